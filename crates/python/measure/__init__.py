"""What calls of ``deep_ep`` take, as their callers see it: tables by shape, and by what may be the cause."""
