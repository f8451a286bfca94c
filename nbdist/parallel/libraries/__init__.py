"""Knowledge of other libraries' layers in a model. None of these libraries is imported."""
