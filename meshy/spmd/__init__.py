"""Base of the roles that compute on several GPUs as one program: one process a GPU, rank 0 leads."""
