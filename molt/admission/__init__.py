"""Which prompt groups run and which finished groups train: pure functions over counts and scalars."""
