"""What users import and type."""

__version__ = "0.1.0"
