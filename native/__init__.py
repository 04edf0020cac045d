"""Small native functions, built where a compiler is, called by ctypes without the GIL."""
