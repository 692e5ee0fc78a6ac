//! Text as databases hold it: words of very different frequency, numbers, codes. zstd at level 1
//! shrinks it to a third or so; no stretch of it is a repetition of another.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Words in the vocabulary.
const WORDS: usize = 4_000;

/// A seeded source of text.
#[derive(Debug)]
pub struct Prose {
    rng: StdRng,
    words: Vec<String>,
}

impl Prose {
    /// The same seed gives the same text.
    pub fn new(seed: u64) -> Prose {
        const ONSETS: [&str; 16] =
            ["b", "c", "d", "f", "g", "l", "m", "n", "p", "r", "s", "t", "st", "pr", "tr", "v"];
        const NUCLEI: [&str; 8] = ["a", "e", "i", "o", "u", "ea", "io", "ou"];
        const CODAS: [&str; 8] = ["", "n", "r", "s", "t", "l", "nd", "ng"];
        let mut rng = StdRng::seed_from_u64(seed);
        let mut words = Vec::with_capacity(WORDS);
        for rank in 0..WORDS {
            // Frequent words are short, as in every language.
            let syllables = 1 + usize::from(rank > 60) + usize::from(rng.random_bool(0.4));
            let mut word = String::new();
            for _ in 0..syllables {
                word.push_str(ONSETS[rng.random_range(0..ONSETS.len())]);
                word.push_str(NUCLEI[rng.random_range(0..NUCLEI.len())]);
                word.push_str(CODAS[rng.random_range(0..CODAS.len())]);
            }
            words.push(word);
        }
        Prose { rng, words }
    }

    /// Appends text of `length` bytes, of letters, digits, blanks, full stops and hyphens.
    pub fn append(&mut self, out: &mut String, length: usize) {
        let end = out.len() + length;
        while out.len() < end {
            let draw: f64 = self.rng.random();
            if draw < 0.04 {
                let number: u32 = self.rng.random_range(1..100_000);
                out.push_str(&number.to_string());
            } else if draw < 0.05 {
                let code: u32 = self.rng.random();
                out.push_str(&format!("{code:08x}"));
            } else {
                // The cube makes low ranks far more frequent, much as Zipf's law has it.
                let rank: f64 = self.rng.random::<f64>().powi(3);
                out.push_str(&self.words[(rank * WORDS as f64) as usize]);
            }
            out.push_str(if draw > 0.93 { ". " } else { " " });
        }
        // All characters are single bytes.
        out.truncate(end);
    }

    /// Text of `length` bytes.
    pub fn take(&mut self, length: usize) -> String {
        let mut out = String::with_capacity(length + 16);
        self.append(&mut out, length);
        out
    }

    /// The source's random numbers, for what is not text.
    pub fn rng(&mut self) -> &mut StdRng {
        &mut self.rng
    }
}

#[cfg(test)]
mod tests {
    use super::Prose;

    #[test]
    fn zstd_level_1_shrinks_it_two_to_four_times_and_a_seed_replays_it() {
        let text = Prose::new(7).take(1 << 20);
        for block in text.as_bytes().chunks(64 << 10) {
            let packed = zstd::bulk::compress(block, 1).unwrap();
            let ratio = block.len() as f64 / packed.len() as f64;
            assert!((2.0..4.0).contains(&ratio), "{ratio}");
        }
        assert_eq!(Prose::new(7).take(1_000), text[..1_000]);
        assert_ne!(Prose::new(8).take(1_000), text[..1_000]);
        assert!(text.bytes().all(|b| b.is_ascii_alphanumeric() || b" .".contains(&b)));
    }
}
