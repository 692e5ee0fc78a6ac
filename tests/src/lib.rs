//! Whole-system scenarios live in this package's `tests/` folder; this library is empty.
