"""What strategies have to know of other libraries' layers in a model. None of these is imported."""
