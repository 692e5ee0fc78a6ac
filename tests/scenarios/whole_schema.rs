//! Databases that nobody here wrote, and what is made of their definitions: whole sample schemas
//! carried to an empty target by one publication of `*.*`.

#[path = "whole_schema/creation.rs"]
mod creation;
#[path = "whole_schema/definitions.rs"]
mod definitions;
#[path = "whole_schema/detached.rs"]
mod detached;
#[path = "whole_schema/joining.rs"]
mod joining;
#[path = "whole_schema/names.rs"]
mod names;
#[path = "whole_schema/otherwise.rs"]
mod otherwise;
#[path = "whole_schema/renamed.rs"]
mod renamed;
#[path = "whole_schema/samples.rs"]
mod samples;
#[path = "whole_schema/sequences.rs"]
mod sequences;
