"""Models that write columns into the rows of others: teachers, a reference, a critic, a reward model, a judge."""
