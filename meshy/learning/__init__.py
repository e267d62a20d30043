"""What the rewards of a batch say of each of its tokens: shared by who trains the policy and who trains a critic."""
