//! Types, and random values of each as SQL expressions.

use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

/// A type with values to choose from.
pub struct Kind {
    /// As SQL names it.
    pub sql: &'static str,
    /// Literals, without quotes and type.
    samples: &'static [&'static str],
    /// Beside the samples.
    random: Option<fn(&mut StdRng) -> String>,
    /// It has a default btree operator class: values can be keys and bounds.
    pub ordered: bool,
}

const fn plain(sql: &'static str, samples: &'static [&'static str]) -> Kind {
    Kind { sql, samples, random: None, ordered: false }
}

const fn ordered(sql: &'static str, samples: &'static [&'static str]) -> Kind {
    Kind { sql, samples, random: None, ordered: true }
}

const fn random(
    sql: &'static str,
    samples: &'static [&'static str],
    random: fn(&mut StdRng) -> String,
) -> Kind {
    Kind { sql, samples, random: Some(random), ordered: true }
}

impl Kind {
    /// A value of the type as an SQL expression, sometimes NULL.
    pub fn value(&self, rng: &mut StdRng) -> String {
        if rng.random_ratio(1, 10) { format!("NULL::{}", self.sql) } else { self.some(rng) }
    }

    /// A value that is not NULL.
    pub fn some(&self, rng: &mut StdRng) -> String {
        let text = match self.random {
            Some(random) if rng.random_ratio(2, 3) => random(rng),
            _ => (*self.samples.choose(rng).expect("a kind has samples")).to_owned(),
        };
        format!("'{}'::{}", text.replace('\'', "''"), self.sql)
    }

    /// An array of up to three dimensions with NULLs in it.
    pub fn array(&self, rng: &mut StdRng) -> String {
        match rng.random_range(0..8) {
            0 => format!("NULL::{}[]", self.sql),
            1 => format!("'{{}}'::{}[]", self.sql),
            2 => {
                let row = |rng: &mut StdRng| format!("[{}, {}]", self.value(rng), self.value(rng));
                format!("ARRAY[{}, {}]::{}[]", row(rng), row(rng), self.sql)
            }
            3 => format!("array_fill({}, ARRAY[2, 1, 2], ARRAY[-1, 0, 5])", self.some(rng)),
            _ => {
                let count = rng.random_range(1..6);
                let values: Vec<String> = (0..count).map(|_| self.value(rng)).collect();
                format!("ARRAY[{}]::{}[]", values.join(", "), self.sql)
            }
        }
    }

    /// A range expression for this kind of bounds.
    pub fn range(&self, name: &str, rng: &mut StdRng) -> String {
        if rng.random_ratio(1, 8) {
            return format!("'empty'::{name}");
        }
        let (a, b) = (self.value(rng), self.value(rng));
        let bounds = ["[]", "[)", "(]", "()"].choose(rng).expect("bounds");
        // greatest() and least() pass over NULLs: each bound may be infinite.
        let (low, high) = match rng.random_range(0..4) {
            0 => (format!("NULL::{}", self.sql), b),
            1 => (a, format!("NULL::{}", self.sql)),
            _ => (format!("least({a}, {b})"), format!("greatest({a}, {b})")),
        };
        format!("{name}({low}, {high}, '{bounds}')")
    }
}

fn text_of(rng: &mut StdRng) -> String {
    const LETTERS: &[&str] = &[
        "a", "Z", "0", " ", "'", "\"", "\\", "\t", "\n", "\r", "{", "}", ",", "é", "ß", "漢", "🦀",
        "\u{301}", "%", "\u{7f}", "NULL",
    ];
    let count = rng.random_range(0..30);
    (0..count).map(|_| *LETTERS.choose(rng).expect("letters")).collect()
}

fn digits(rng: &mut StdRng, count_max: usize) -> String {
    let count = rng.random_range(1..=count_max);
    (0..count).map(|_| char::from(b'0' + rng.random_range(0..10u8))).collect()
}

fn numeric(rng: &mut StdRng) -> String {
    let sign = if rng.random() { "-" } else { "" };
    let whole = digits(rng, 40);
    if rng.random() {
        format!("{sign}{whole}.{}", digits(rng, 40))
    } else {
        format!("{sign}{whole}")
    }
}

fn hex(rng: &mut StdRng, bytes: usize) -> String {
    (0..bytes).map(|_| format!("{:02x}", rng.random::<u8>())).collect()
}

fn bits(rng: &mut StdRng, count: usize) -> String {
    (0..count).map(|_| if rng.random() { '1' } else { '0' }).collect()
}

fn timestamp(rng: &mut StdRng) -> String {
    format!("{} {}", date(rng), time(rng))
}

fn date(rng: &mut StdRng) -> String {
    let (year, month, day) =
        (rng.random_range(1..9999), rng.random_range(1..13), rng.random_range(1..29));
    format!("{year:04}-{month:02}-{day:02}")
}

fn time(rng: &mut StdRng) -> String {
    let (h, m, s) = (rng.random_range(0..24), rng.random_range(0..60), rng.random_range(0..60));
    format!("{h:02}:{m:02}:{s:02}.{:06}", rng.random_range(0..1_000_000))
}

fn float8(rng: &mut StdRng) -> String {
    loop {
        let value = f64::from_bits(rng.random());
        if value.is_finite() {
            return format!("{value:e}");
        }
    }
}

fn float4(rng: &mut StdRng) -> String {
    loop {
        let value = f32::from_bits(rng.random());
        if value.is_finite() {
            return format!("{value:e}");
        }
    }
}

/// Built-in types whose values mean the same on every server.
pub const BUILT_IN: &[Kind] = &[
    ordered("boolean", &["t", "f"]),
    random("smallint", &["-32768", "32767", "0"], |rng| rng.random::<i16>().to_string()),
    random("integer", &["-2147483648", "2147483647", "0"], |rng| rng.random::<i32>().to_string()),
    random("bigint", &["-9223372036854775808", "9223372036854775807"], |rng| {
        rng.random::<i64>().to_string()
    }),
    random(
        "numeric",
        &["NaN", "Infinity", "-Infinity", "0", "0.000", "1e1000", "1e-1000"],
        numeric,
    ),
    random("numeric(12,4)", &["0", "-1.5", "99999999.9999"], |rng| {
        format!("{}.{}", digits(rng, 8), digits(rng, 4))
    }),
    random("real", &["NaN", "Infinity", "-Infinity", "-0", "1e-45", "3.4028235e38"], float4),
    random("double precision", &["NaN", "Infinity", "-Infinity", "-0", "5e-324", "0.1"], float8),
    random("money", &["0", "-92233720368547758.08", "92233720368547758.07"], |rng| {
        format!("{}.{:02}", digits(rng, 12), rng.random_range(0..100))
    }),
    random("text", &["", " ", "\\N", "\\.", "NULL", "null"], text_of),
    random("varchar", &["", "\\"], text_of),
    random("varchar(40)", &["x", "ends with blanks  "], |rng| {
        text_of(rng).chars().take(40).collect()
    }),
    random("char(30)", &["x", "ends with blanks  "], |rng| text_of(rng).chars().take(30).collect()),
    ordered("\"char\"", &["a", " ", "~", "", "'"]),
    random("name", &["", "Odd\"Name", "día"], |rng| text_of(rng).chars().take(15).collect()),
    random("bytea", &["", "\\x00", "\\x5c00ff27"], |rng| {
        let bytes = rng.random_range(0..60);
        format!("\\x{}", hex(rng, bytes))
    }),
    random("date", &["infinity", "-infinity", "4713-01-01 BC", "5874897-12-31"], date),
    random("time", &["00:00", "24:00", "23:59:59.999999"], time),
    random("timetz", &["00:00+15:59", "24:00-15:59"], |rng| {
        format!("{}{:+03}:30", time(rng), rng.random_range(-14..14))
    }),
    random(
        "timestamp",
        &["infinity", "-infinity", "4713-01-01 00:00 BC", "294276-12-31 23:59:59.999999"],
        timestamp,
    ),
    random("timestamptz", &["infinity", "-infinity", "4713-01-01 00:00+00 BC"], |rng| {
        format!("{}{:+03}", timestamp(rng), rng.random_range(-12..13))
    }),
    random("timestamptz(3)", &["2024-02-29 23:59:59.9995+00"], |rng| {
        format!("{}+00", timestamp(rng))
    }),
    random("interval", &["0", "-1 year 3 days -04:05:06.789", "1 mon -1 day"], |rng| {
        format!("{} mons {} days {}", rng.random::<i16>(), rng.random::<i16>(), time(rng))
    }),
    random("uuid", &["00000000-0000-0000-0000-000000000000"], |rng| hex(rng, 16)),
    random("bit(13)", &["0000000000000", "1111111111111"], |rng| bits(rng, 13)),
    random("varbit", &["", "1"], |rng| {
        let count = rng.random_range(0..70);
        bits(rng, count)
    }),
    random("inet", &["::1", "10.0.0.1/8", "255.255.255.255", "fe80::1/10"], |rng| {
        format!("10.{}.{}.1/{}", rng.random::<u8>(), rng.random::<u8>(), rng.random_range(0..33))
    }),
    ordered("cidr", &["10.0.0.0/8", "192.168.100.128/25", "2001:4f8:3:ba::/64", "::/0"]),
    random("macaddr", &["00:00:00:00:00:00"], |rng| hex(rng, 6)),
    random("macaddr8", &["08:00:2b:01:02:03:04:05"], |rng| hex(rng, 8)),
    random("oid", &["0", "4294967295", "16384"], |rng| rng.random::<u32>().to_string()),
    plain("xid", &["0", "3", "4294967295"]),
    ordered("xid8", &["0", "18446744073709551615"]),
    plain("cid", &["0", "4294967295"]),
    ordered("tid", &["(0,0)", "(4294967294,65535)"]),
    random("pg_lsn", &["0/0", "FFFFFFFF/FFFFFFFF"], |rng| {
        format!("{:X}/{:X}", rng.random::<u32>(), rng.random::<u32>())
    }),
    plain("pg_snapshot", &["10:20:10,14,15", "1:1:"]),
    plain("txid_snapshot", &["10:20:10,14,15"]),
    plain("refcursor", &["", "a cursor"]),
    plain("json", &["null", "{\"a\" : 1,  \"a\": [1.50, \"\\u00e9\\\"\"]}", "[]", "\"é漢🦀\""]),
    ordered(
        "jsonb",
        &["null", "{\"a\": 1, \"b\": {\"c\": [1.50, null, true, \"é\\\"\"]}}", "[]", "-0", "1e400"],
    ),
    plain("jsonpath", &["$", "strict $.a[*] ? (@.b > 1).c", "lax $.\"é\".size()"]),
    plain(
        "xml",
        &[
            "",
            "text only",
            "<a>é</a>",
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?><a b=\"1\">漢<!-- c --></a>",
            "<a/><b/>",
        ],
    ),
    ordered("tsvector", &["", "b a:1A,2B c:16383", "'it''s' '\\\\' 漢", "zz a bb ccc a"]),
    plain("point", &["(NaN,Infinity)", "(0,-0)", "(0.1,1e-300)"]),
    plain("line", &["{1,-1,0.5}", "{0,1,-3}"]),
    plain("lseg", &["[(0,0),(1,1)]", "[(-1e300,1e-300),(2,2)]"]),
    plain("box", &["(1,1),(0,0)", "(3,4),(1,2)"]),
    plain("path", &["[(0,0),(1,1),(2,0)]", "((0,0),(1,1),(2,0))"]),
    plain("polygon", &["((0,0))", "((0,0),(1,1),(2,0))"]),
    plain("circle", &["<(0,0),0>", "<(1.5,-2),1e10>"]),
];

/// Types of contrib modules whose values have a binary form.
pub const CONTRIB: &[Kind] = &[
    random("citext", &["", "Ab", "aB"], text_of),
    ordered("hstore", &["", "a=>1, b=>NULL, \"é \\\"x\\\"\"=>\"y=>z\""]),
    ordered("ltree", &["", "a.b.c", "Top.Science.Astronomy"]),
    plain("lquery", &["*.a.!b|c.*{1,2}", "Top*@.x"]),
    plain("ltxtquery", &["a & !b* | c@"]),
    ordered("cube", &["(1,2,3)", "(0),(1)", "(-1e300,2),(3,4.5)"]),
    ordered("lo", &["0", "4294967295"]),
];

/// Types whose values are names of things in the database, or that have no binary form: a
/// publication with such a column (or an array of it) comes as text.
pub const NAMED: &[Kind] = &[
    plain("regclass", &["pg_class", "things.\"Odd table\"", "0", "things.t"]),
    plain("regtype", &["integer", "things.mood", "things.mood[]", "character varying"]),
    plain("regproc", &["pg_catalog.now", "things.double"]),
    plain("regprocedure", &["things.double(integer)", "abs(bigint)"]),
    plain("regoper", &["pg_catalog.||/"]),
    plain("regoperator", &["pg_catalog.+(integer,integer)"]),
    plain("regrole", &["pg_monitor", "pg_read_all_data"]),
    plain("regnamespace", &["things", "pg_catalog"]),
    plain("regconfig", &["simple", "english"]),
    plain("regdictionary", &["simple"]),
    plain("regcollation", &["\"C\"", "\"POSIX\""]),
    plain("aclitem", &["pg_monitor=r/pg_monitor", "=rw/pg_monitor"]),
    ordered("oidvector", &["", "1 2 3", "4294967295"]),
    plain("int2vector", &["", "1 -2 3"]),
    ordered("tsquery", &["", "a & !b | c:*AB", "a <-> b <3> c", "'é x'"]),
    ordered("seg", &["1.5 .. 2", "~3", "< 4"]),
    ordered("isbn13", &["978-0-393-04002-9"]),
    plain("query_int", &["1&(2|!3)"]),
    ordered("integer", &["7"]),
    ordered("money", &["1234.56", "-0.01"]),
    ordered("interval", &["-1 year 3 days -04:05:06.789"]),
    ordered("double precision", &["0.1", "1e300"]),
    ordered("timestamptz", &["2024-02-29 23:59:59.999+00", "infinity"]),
    ordered("bytea", &["\\x00ff5c"]),
    ordered("text", &["é\\N\t"]),
];
/// A random identifier, unique by `number`.
pub fn odd_name(rng: &mut StdRng, number: usize) -> String {
    const NAMES: [&str; 17] = [
        "plain",
        "UPPER",
        "with space",
        "quo\"te",
        "se;mi",
        "día",
        "漢字",
        "dot.ted",
        "select",
        "back\\slash",
        "per%cent",
        "$dollar",
        "a'b",
        "\u{1F980}",
        "-",
        "1digit",
        "tab\tname",
    ];
    format!("{}{number}", NAMES.choose(rng).expect("names"))
}
