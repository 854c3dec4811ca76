"""What all tests share."""

from hypothesis import settings

# A slow moment of the machine is no failure.
settings.register_profile("book", deadline=None)
settings.load_profile("book")
