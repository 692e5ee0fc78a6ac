//! Real databases through farshore, in both directions between PostgreSQL 15 and 18. Every scenario
//! ends with a comparison of both sides by checksum, taken when the subscriber shows the
//! publisher's last commit.

#[path = "end_to_end/batches.rs"]
mod batches;
#[path = "end_to_end/catch_up.rs"]
mod catch_up;
#[path = "end_to_end/changes.rs"]
mod changes;
#[path = "end_to_end/ddl.rs"]
mod ddl;
#[path = "end_to_end/early.rs"]
mod early;
#[path = "end_to_end/filters.rs"]
mod filters;
#[path = "end_to_end/identities.rs"]
mod identities;
#[path = "end_to_end/lanes.rs"]
mod lanes;
#[path = "end_to_end/lanes_and_foreign_keys.rs"]
mod lanes_and_foreign_keys;
#[path = "end_to_end/old_values.rs"]
mod old_values;
#[path = "end_to_end/operation.rs"]
mod operation;
#[path = "end_to_end/publications.rs"]
mod publications;
#[path = "end_to_end/renamed_columns.rs"]
mod renamed_columns;
#[path = "end_to_end/renamed_labels.rs"]
mod renamed_labels;
#[path = "end_to_end/replaced_columns.rs"]
mod replaced_columns;
#[path = "end_to_end/streamed.rs"]
mod streamed;
#[path = "end_to_end/unix_sockets.rs"]
mod unix_sockets;
