//! Publications that cross from one site to another, and are applied there.

mod pull {
    mod faults;
    mod line;
    mod refusals;
    mod whole;
}
