"""Who starts whom, who watches whom: the processes of one server and their lifetime."""
