//! Placeholder for the next slice.
