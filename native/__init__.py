"""Small native functions, built if there is a C compiler, and called by ctypes without the GIL."""
