//! Site files that mean nothing: every verb says the same and ends with exit code 2.

use crate::case::{compare, normal, pair};
use anyhow::{Result, ensure};

/// What is replaced in a good site file, by what, and what is said.
const CASES: &[(&str, &str, &str)] = &[
    ("tables =", "table =", "?"),
    ("[site]", "[sight]", "?"),
    ("[subscription.s]", "[subscription.s]\nstreems = 4", "?"),
    ("name = \"t1\"", "name = \"Tukwila!\"", "?"),
    ("name = \"t1\"", "name = 7", "?"),
    ("name = \"t1\"\n", "", "?"),
    ("[publication.p]", "[publication.P]", "?"),
    ("[publication.p]", "[publication.pppppppppppppppppppppppppppppppppppppppppppppppp]", "?"),
    ("[subscription.s]", "[subscription.\"s s\"]", "?"),
    ("publication = \"p\"", "publication = \"q\"", "?"),
    ("'public.*'", "'t'", "?"),
    ("'public.*'", "'public.t.x'", "?"),
    ("'public.*'", "'\"public.t'", "?"),
    ("'public.*', 'farshore_marks.mark'", "", "?"),
    ("tables =", "tables = \"public.t\"\n#", "?"),
    ("[subscription.s]", "[[subscription.s", "?"),
    ("tables =", "retention_age = \"3 fortnights\"\ntables =", "?"),
    ("tables =", "retention_size = \"50\"\ntables =", "?"),
    ("tables =", "segment_size = \"1KB\"\ntables =", "?"),
    ("[subscription.s]", "[subscription.s]\ncopy_workers = 0", "?"),
    ("[subscription.s]", "[subscription.s]\ngroup_transactions = 0", "?"),
    ("SOURCE", "mysql://root@db1/x", "?"),
    ("SOURCE", "postgres://postgres@127.0.0.1:notaport/postgres", "?"),
    ("SOURCE", "postgres://postgres@127.0.0.1/postgres?sslmode=maybe", "?"),
    ("SOURCE", "postgres://postgres@127.0.0.1/postgres?sslmod=disable", "?"),
    ("SOURCE", "service=nope", "?"),
    (
        "tables =",
        "adopt_publication = \"x\"\ntables = []\n[publication.p.article.\"a.b\"]\ncolumns =",
        "?",
    ),
    (
        "[subscription.s]",
        "[publication.p-1]\nsource = \"SOURCE\"\ntables = [\"public.t\"]\n\
         [publication.p_1]\nsource = \"SOURCE\"\ntables = [\"public.u\"]\n[subscription.s]",
        "?",
    ),
];

#[test]
fn site_files_that_mean_nothing() -> Result<()> {
    let mut pair = pair()?;
    let good = std::fs::read_to_string(pair.site.file())?;
    let source = pair.publisher.url("postgres");
    let mut failed = Vec::new();
    for (from, to, wanted) in CASES {
        let from = from.replace("SOURCE", &source);
        let bad = good.replacen(&from, &to.replace("SOURCE", &source), 1);
        ensure!(bad != good, "{from} is not in the site file");
        std::fs::write(pair.site.file(), bad)?;
        for verb in ["check", "run", "status"] {
            let said = pair.site.verb(verb, &[])?;
            let text = normal(&pair, said.stderr.trim_end());
            let as_wanted = if said.code == Some(2) {
                compare(&format!("{verb}: {to}"), &[text], &[wanted])
            } else {
                Err(anyhow::anyhow!("{verb}: {to}: exit code {:?}: {text}", said.code))
            };
            if let Err(error) = as_wanted {
                failed.push(format!("{error:#}"));
                break;
            }
        }
    }
    std::fs::remove_file(pair.site.file())?;
    let said = pair.site.verb("run", &[])?;
    ensure!(said.code == Some(2), "{said:?}");
    if let Err(error) = compare("no file", &[normal(&pair, said.stderr.trim_end())], &["?"]) {
        failed.push(format!("{error:#}"));
    }
    ensure!(failed.is_empty(), "{} failed:\n\n{}", failed.len(), failed.join("\n\n"));
    // Nothing was made or lost meanwhile, and the right file runs.
    ensure!(!pair.site.directory().join("data").exists(), "a data directory was made");
    std::fs::write(pair.site.file(), good)?;
    pair.site.start()?;
    pair.assert_equal(&["public"])
}

#[test]
fn a_data_directory_that_cannot_be() -> Result<()> {
    let mut pair = pair()?;
    std::fs::write(pair.site.directory().join("file"), "in the way")?;
    pair.site.replace("data_dir = \"data\"", "data_dir = \"file/data\"")?;
    let said = pair.site.verb("run", &[])?;
    ensure!(said.code == Some(1), "{said:?}");
    let last = said.stderr.lines().last().unwrap_or_default();
    compare("run", &[normal(&pair, last)], &["?"])?;
    pair.site.replace("file/data", "data")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])
}
