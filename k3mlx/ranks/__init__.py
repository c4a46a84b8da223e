"""One model on several machines: rank 0 holds the dense weights and the sessions, every rank a part of the experts."""
