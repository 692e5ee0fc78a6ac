//! What is created, when, and what is not.
