"""Training, evaluation and tuning of the predictors. Never on a decision path."""
