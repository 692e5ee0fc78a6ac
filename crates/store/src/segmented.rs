//! The embedded store: segments on local disk. Format: `docs/formats/segment.md`.
