//! Every crash point and defect that the product names is listed, and every one that is listed is
//! in the product: what is missing in a list would end a node that is to be tested, and what is in
//! the list alone would prove nothing.

use std::collections::BTreeSet;
use std::path::Path;

/// The names in calls of this function, in the sources below a folder.
fn collect(folder: &Path, call: &str, names: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            collect(&path, call, names);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).expect("a source");
            // However it is broken into lines.
            let text: String = text.split_whitespace().collect();
            let calls = text.split(call).skip(1);
            names.extend(calls.filter_map(|rest| rest.split('"').next()).map(str::to_owned));
        }
    }
}

fn in_the_product(function: &str) -> BTreeSet<String> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(crates).expect("the crates") {
        let sources = entry.expect("a crate").path().join("src");
        if sources.is_dir() {
            // Called as `fault::point` or `farshore_fault::point`.
            collect(&sources, &format!("fault::{function}(\""), &mut names);
        }
    }
    names
}

fn listed(names: &[&str]) -> BTreeSet<String> {
    let set: BTreeSet<String> = names.iter().map(|name| (*name).to_owned()).collect();
    assert_eq!(set.len(), names.len(), "a name is listed twice");
    set
}

#[test]
fn crash_points_are_those_of_the_product() {
    assert_eq!(in_the_product("point"), listed(farshore_fault::POINTS));
}

#[test]
fn defects_are_those_of_the_product() {
    assert_eq!(in_the_product("defect"), listed(farshore_fault::DEFECTS));
}
