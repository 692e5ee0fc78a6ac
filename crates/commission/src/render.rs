//! Reports for people: in a terminal, and as one HTML file.

mod chart;
mod html;
mod terminal;

pub use html::html;
pub use terminal::{comparison, terminal};

use crate::report::{At, Dimension, DimensionKind};
use crate::units;

/// A value of a dimension, as people write it.
fn at(dimension: Option<&Dimension>, value: &At) -> String {
    match (value, dimension.map(|dimension| dimension.kind)) {
        (At::Word(word), _) => word.clone(),
        (At::Number(number), Some(DimensionKind::Bytes)) => units::bytes(*number),
        (At::Number(number), _) => units::count(*number),
    }
}
