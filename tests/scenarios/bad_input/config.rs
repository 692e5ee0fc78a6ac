//! Site files that mean nothing: every verb says the same and ends with exit code 2.

use crate::case::{compare, normal, pair};
use anyhow::{Result, ensure};

/// What is replaced in a good site file, by what, and what is said.
const CASES: &[(&str, &str, &str)] = &[
    (
        "tables =",
        "table =",
        "farshore: site file DIRECTORY/site.toml: TOML parse error at line 7, column 1\n  |\n7 | table = ['public.*', 'farshore_marks.mark']\n  | ^^^^^\nunknown field `table`, expected one of …",
    ),
    (
        "tables =",
        "tabels =",
        "farshore: site file DIRECTORY/site.toml: TOML parse error at line 7, column 1\n  |\n7 | tabels = ['public.*', 'farshore_marks.mark']\n  | ^^^^^^\nunknown field `tabels`, expected one of …. Did you mean `tables`?",
    ),
    (
        "[subscription.s]",
        "[subscripton.s]",
        "farshore: site file DIRECTORY/site.toml: TOML parse error at line 10, column 2\n   |\n10 | [subscripton.s]\n   |  ^^^^^^^^^^^\nunknown field `subscripton`, expected one of …. Did you mean `subscription`?",
    ),
    (
        "[site]",
        "[sight]",
        "farshore: site file DIRECTORY/site.toml: TOML parse error at line 1, column 2\n  |\n1 | [sight]\n  |  ^^^^^\nunknown field `sight`, expected one of `site`, `publication`, `subscription`, `upstream`, `downstream`, `mirror`, `thresholds`",
    ),
    (
        "[subscription.s]",
        "[subscription.s]\nstreems = 4",
        "farshore: site file DIRECTORY/site.toml: TOML parse error at line 11, column 1\n   |\n11 | streems = 4\n   | ^^^^^^^\nunknown field `streems`, expected one of …",
    ),
    (
        "name = \"t1\"",
        "name = \"Tukwila!\"",
        "farshore: site file DIRECTORY/site.toml, [site] name: \"Tukwila!\" cannot be a name: use 1 to 40 lower-case letters, digits, _ and -, beginning with a letter",
    ),
    (
        "name = \"t1\"",
        "name = 7",
        "farshore: site file DIRECTORY/site.toml: TOML parse error at line 2, column 8\n  |\n2 | name = 7\n  |        ^\ninvalid type: integer `7`, expected a string",
    ),
    (
        "name = \"t1\"\n",
        "",
        "farshore: site file DIRECTORY/site.toml: TOML parse error at line 1, column 1\n  |\n1 | [site]\n  | ^^^^^^\nmissing field `name`",
    ),
    (
        "[publication.p]",
        "[publication.P]",
        "farshore: site file DIRECTORY/site.toml, [publication.P]: \"P\" cannot be a name: use 1 to 40 lower-case letters, digits, _ and -, beginning with a letter",
    ),
    (
        "[publication.p]",
        "[publication.pppppppppppppppppppppppppppppppppppppppppppppppp]",
        "farshore: site file DIRECTORY/site.toml, [publication.…]: \"pppppppppppppppppppppppppppppppppppppppppppppppp\" cannot be a name: use 1 to 40 lower-case letters, digits, _ and -, beginning with a letter",
    ),
    (
        "[subscription.s]",
        "[subscription.\"s s\"]",
        "farshore: site file DIRECTORY/site.toml, [subscription.s s]: \"s s\" cannot be a name: use 1 to 40 lower-case letters, digits, _ and -, beginning with a letter",
    ),
    (
        "publication = \"p\"",
        "publication = \"q\"",
        "farshore: site file DIRECTORY/site.toml, [subscription.s]: publication \"q\" is not configured here (there are: p)",
    ),
    (
        "'public.*'",
        "'t'",
        "farshore: site file DIRECTORY/site.toml, [publication.p]: tables: \"t\" is not of the form schema.table, schema.* or *.*",
    ),
    (
        "'public.*'",
        "'public.t.x'",
        "farshore: site file DIRECTORY/site.toml, [publication.p]: tables: \"public.t.x\" is not of the form schema.table, schema.* or *.*",
    ),
    (
        "'public.*'",
        "'\"public.t'",
        "farshore: site file DIRECTORY/site.toml, [publication.p]: tables: \"\"public.t\" has a quote that is not closed",
    ),
    (
        "'public.*', 'farshore_marks.mark'",
        "",
        "farshore: site file DIRECTORY/site.toml, [publication.p]: tables: name at least one table, schema.* or *.*",
    ),
    (
        "tables =",
        "tables = \"public.t\"\n#",
        "farshore: site file DIRECTORY/site.toml: TOML parse error at line 7, column 10\n  |\n7 | tables = \"public.t\"\n  |          ^^^^^^^^^^\ninvalid type: string \"public.t\", expected a sequence",
    ),
    (
        "[subscription.s]",
        "[[subscription.s",
        "farshore: site file DIRECTORY/site.toml: TOML parse error at line 10, column 17\n   |\n10 | [[subscription.s\n   |                 ^\nunclosed array table, expected `]]`",
    ),
    (
        "tables =",
        "retention_age = \"3 fortnights\"\ntables =",
        "farshore: site file DIRECTORY/site.toml, [publication.p]: retention_age: \"3 fortnights\" is not a time such as 90s, 15min, 72h or 7d",
    ),
    (
        "tables =",
        "retention_size = \"50\"\ntables =",
        "farshore: site file DIRECTORY/site.toml, [publication.p]: retention_size: \"50\" is not a size such as 512KB, 64MB, 50GB or 2TB",
    ),
    (
        "tables =",
        "segment_size = \"1KB\"\ntables =",
        "farshore: site file DIRECTORY/site.toml, [publication.p]: segment_size: must be from 64KB to 4GB",
    ),
    (
        "[subscription.s]",
        "[subscription.s]\ncopy_workers = 0",
        "farshore: site file DIRECTORY/site.toml, [subscription.s]: copy_workers: must be from 1 to 64",
    ),
    (
        "[subscription.s]",
        "[subscription.s]\ngroup_transactions = 0",
        "farshore: site file DIRECTORY/site.toml, [subscription.s]: group_transactions: must be at least 1",
    ),
    (
        "SOURCE",
        "mysql://root@db1/x",
        "farshore: site file DIRECTORY/site.toml, [publication.p]: source: malformed connection string: a URL must begin with postgres://",
    ),
    (
        "SOURCE",
        "postgres://postgres@127.0.0.1:notaport/postgres",
        "farshore: site file DIRECTORY/site.toml, [publication.p]: source: connection parameter \"port\" cannot be \"notaport\"; expected 1 to 65535",
    ),
    (
        "SOURCE",
        "postgres://postgres@127.0.0.1/postgres?sslmode=maybe",
        "farshore: site file DIRECTORY/site.toml, [publication.p]: source: connection parameter \"sslmode\" cannot be \"maybe\"; expected one of disable, allow, prefer, require, verify-ca, verify-full",
    ),
    (
        "SOURCE",
        "postgres://postgres@127.0.0.1/postgres?sslmod=disable",
        "farshore: site file DIRECTORY/site.toml, [publication.p]: source: unknown connection parameter \"sslmod\"; did you mean \"sslmode\"?",
    ),
    (
        "SOURCE",
        "service=nope",
        "farshore: site file DIRECTORY/site.toml, [publication.p]: source: no service \"nope\" in any service file: …",
    ),
    (
        "tables =",
        "adopt_publication = \"x\"\ntables = []\n[publication.p.article.\"a.b\"]\ncolumns =",
        "farshore: site file DIRECTORY/site.toml, [publication.p]: articles belong to publications that Farshore makes; an adopted one has its own filters and columns",
    ),
    (
        "[subscription.s]",
        "[publication.p-1]\nsource = \"SOURCE\"\ntables = [\"public.t\"]\n\
         [publication.p_1]\nsource = \"SOURCE\"\ntables = [\"public.u\"]\n[subscription.s]",
        "farshore: site file DIRECTORY/site.toml, [publication.p_1]: it would use replication slot \"farshore_p_1\", as publication \"p-1\" does. Rename one of the two",
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
    if let Err(error) = compare(
        "no file",
        &[normal(&pair, said.stderr.trim_end())],
        &[
            "farshore: cannot read site file DIRECTORY/site.toml: No such file or directory (os error 2)",
        ],
    ) {
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
    compare(
        "run",
        &[normal(&pair, last)],
        &[
            "farshore: cannot create DIRECTORY/file/data: Not a directory (os error 20). Check data_dir in the site file",
        ],
    )?;
    pair.site.replace("file/data", "data")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])
}
