//! Medians, and what is more than noise.

/// The middle one; of an even number the mean of the two in the middle; 0 of none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.get(middle) {
        None => 0.0,
        Some(high) if sorted.len() % 2 == 1 => *high,
        Some(high) => (sorted[middle - 1] + high) / 2.0,
    }
}

/// Smallest and largest; zeros of none.
pub fn range(values: &[f64]) -> (f64, f64) {
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if low > high { (0.0, 0.0) } else { (low, high) }
}

/// Differences smaller than this share are not called changes, however small the spread was: two
/// runs on the same machine differ by that much for reasons that three repeats do not show.
pub const SMALLEST_CHANGE: f64 = 0.05;
/// Fewer repeats than this have no spread to speak of.
pub const REPEATS_MIN: usize = 3;

/// What two sets of repeats say about each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Difference {
    /// Beyond the noise.
    Changed,
    /// Within it.
    Noise,
    /// One of them was taken fewer than [`REPEATS_MIN`] times.
    TooFewRepeats,
}

/// Whether the medians lie further apart than both ranges together, and than
/// [`SMALLEST_CHANGE`]. With three repeats each of figures that spread normally, chance alone gives
/// that in about one of a hundred comparisons.
pub fn difference(before: &[f64], after: &[f64]) -> Difference {
    if before.len() < REPEATS_MIN || after.len() < REPEATS_MIN {
        return Difference::TooFewRepeats;
    }
    let (before_low, before_high) = range(before);
    let (after_low, after_high) = range(after);
    let apart = (median(after) - median(before)).abs();
    let noise = (before_high - before_low) + (after_high - after_low);
    if apart > noise && apart > SMALLEST_CHANGE * median(before).abs() {
        Difference::Changed
    } else {
        Difference::Noise
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    #[test]
    fn medians_and_ranges_of_few() {
        assert_eq!(median(&[]), 0.0);
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(range(&[]), (0.0, 0.0));
        assert_eq!(range(&[2.0, -1.0]), (-1.0, 2.0));
    }

    #[test]
    fn what_is_beyond_the_noise() {
        let steady = [100.0, 101.0, 99.0];
        for (after, expected) in [
            ([150.0, 151.0, 149.0], Difference::Changed),
            ([104.0, 104.1, 104.2], Difference::Noise),
            ([150.0, 90.0, 200.0], Difference::Noise),
            ([60.0, 61.0, 62.0], Difference::Changed),
        ] {
            assert_eq!(difference(&steady, &after), expected, "{after:?}");
        }
        assert_eq!(difference(&steady[..2], &steady), Difference::TooFewRepeats);
    }

    #[test]
    fn chance_alone_is_rarely_called_a_change() {
        let mut rng = StdRng::seed_from_u64(33);
        // A sum of twelve is near enough to normal; a tenth is the standard deviation.
        let mut draw = || {
            let sum: f64 = (0..12).map(|_| rng.random::<f64>()).sum();
            100.0 + 10.0 * (sum - 6.0)
        };
        let called = (0..10_000)
            .filter(|_| {
                let (before, after) = ([draw(), draw(), draw()], [draw(), draw(), draw()]);
                difference(&before, &after) == Difference::Changed
            })
            .count();
        assert!(called < 200, "{called} of 10,000");
    }
}
