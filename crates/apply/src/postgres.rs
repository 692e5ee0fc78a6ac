//! A PostgreSQL target.

mod answers;
pub(crate) mod apart;
pub mod batch;
mod conflict_rows;
mod copy_order;
mod explain;
pub mod follow_ddl;
pub mod foreign_keys;
pub(crate) mod in_use;
pub mod initial_copy;
pub mod lanes;
pub(crate) mod log_points;
mod no_partition;
pub(crate) mod noted_definition;
pub mod pipeline;
pub mod progress;
mod put_off;
mod remade;
pub mod resume;
pub mod schema;
pub(crate) mod sequences;
pub mod session;
pub mod statements;
pub mod target_table;
pub mod value_plan;
pub mod writer;
