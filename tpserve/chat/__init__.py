"""`tpserve chat`: a conversation in the terminal with a server that runs, this one or another of its kind."""
