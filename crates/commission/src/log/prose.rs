use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// Words to choose from.
const WORDS: usize = 2_000;

/// Text as columns hold it: words, some far more frequent than others, and numbers. It shrinks as
/// such text does, and no stretch of it repeats another.
#[derive(Debug)]
pub struct Prose {
    rng: SmallRng,
    words: Vec<String>,
}

impl Prose {
    /// A new source of text.
    pub fn new() -> Prose {
        let mut rng = SmallRng::from_rng(&mut rand::rng());
        let word = |rng: &mut SmallRng| -> String {
            let length = rng.random_range(2..10);
            (0..length).map(|_| char::from(rng.random_range(b'a'..=b'z'))).collect()
        };
        let words = (0..WORDS).map(|_| word(&mut rng)).collect();
        Prose { rng, words }
    }

    /// `length` characters of letters, digits and blanks, each a byte.
    pub fn take(&mut self, length: usize) -> String {
        let mut text = String::with_capacity(length + 16);
        while text.len() < length {
            if self.rng.random_bool(0.05) {
                text.push_str(&self.rng.random_range(0..1_000_000_u32).to_string());
            } else {
                // The square makes the first words the frequent ones.
                let rank = self.rng.random::<f64>().powi(2) * WORDS as f64;
                text.push_str(&self.words[(rank as usize).min(WORDS - 1)]);
            }
            text.push(' ');
        }
        text.truncate(length);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn text_has_its_length_and_does_not_repeat_itself() {
        let mut prose = Prose::new();
        let text = prose.take(4_000);
        assert_eq!(text.len(), 4_000);
        assert!(text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b' '));
        let stretches: BTreeSet<&[u8]> = text.as_bytes().windows(40).collect();
        assert_eq!(stretches.len(), 4_000 - 39);
        assert_ne!(prose.take(100), text[..100]);
    }
}
