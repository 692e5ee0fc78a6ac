/// The candidate that somebody who typed `word` probably meant; `None` when nothing is near.
pub fn nearest<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let near = candidates.map(|candidate| (distance(word, candidate), candidate)).min()?;
    let (typos, candidate) = near;
    (typos <= word.chars().count().max(candidate.chars().count()) / 3).then_some(candidate)
}

/// How many letters have to be added, removed, replaced or swapped with their neighbour.
fn distance(from: &str, to: &str) -> usize {
    let (from, to): (Vec<char>, Vec<char>) = (from.chars().collect(), to.chars().collect());
    let mut rows: Vec<Vec<usize>> = vec![(0..=to.len()).collect()];
    for (i, a) in from.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, b) in to.iter().enumerate() {
            let replaced = rows[i][j] + usize::from(a != b);
            let mut least = replaced.min(rows[i][j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && *a == to[j - 1] && from[i - 1] == *b {
                least = least.min(rows[i - 1][j - 1] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[from.len()][to.len()]
}

#[cfg(test)]
mod tests {
    use super::nearest;

    #[test]
    fn typos_are_seen_through() {
        let keys = ["source", "tables", "article", "retention_age", "where"];
        for (typed, meant) in [
            ("tabels", Some("tables")),
            ("table", Some("tables")),
            ("sorce", Some("source")),
            ("retention_ages", Some("retention_age")),
            ("Where", Some("where")),
            ("colour", None),
            ("x", None),
            ("", None),
        ] {
            assert_eq!(nearest(typed, keys.into_iter()), meant, "{typed}");
        }
        assert_eq!(nearest("a", [].into_iter()), None);
    }
}
