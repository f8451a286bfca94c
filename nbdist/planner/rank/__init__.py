"""A live model described on its rank, and one real step measured and put back."""
