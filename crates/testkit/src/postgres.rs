//! Throwaway PostgreSQL clusters.
//!
//! ```no_run
//! use farshore_testkit::postgres::{Cluster, Installation};
//! # fn main() -> anyhow::Result<()> {
//! let pg18 = Installation::find(18)?;
//! let mut cluster = Cluster::builder(&pg18).setting("wal_level", "logical").start()?;
//! cluster.execute_script("CREATE TABLE t (id int PRIMARY KEY)")?;
//! cluster.kill9()?;
//! cluster.start()?;
//! # Ok(()) }
//! ```

mod cluster;
mod copies;
mod installation;
mod template;

pub use cluster::{Cluster, ClusterBuilder, StopMode};
pub use copies::Backup;
pub use installation::{Installation, cache_dir};
pub use template::copy_tree;
