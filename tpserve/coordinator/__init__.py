"""The coordinator: schedules steps, owns the pages' accounting and the prefix index of one epoch. Torch-free."""
