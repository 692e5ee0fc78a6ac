//! A server's backup manifest (PostgreSQL docs: "71. Backup Manifest Format").

use ring::digest::{SHA256, digest};
use serde::Deserialize;

/// What a manifest says of one file.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Entry {
    /// Relative to the data directory.
    pub path: Option<String>,
    /// The path in hexadecimal, if it is not UTF-8.
    #[serde(rename = "Encoded-Path")]
    pub encoded_path: Option<String>,
    /// In bytes.
    pub size: u64,
    /// What `checksum` is.
    #[serde(rename = "Checksum-Algorithm")]
    pub algorithm: Option<String>,
    /// In hexadecimal.
    pub checksum: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Manifest {
    files: Vec<Entry>,
    #[serde(rename = "Manifest-Checksum")]
    checksum: String,
}

/// Reads a manifest whose own checksum is right.
///
/// # Errors
/// What is wrong with it, for a person.
pub fn read(text: &[u8]) -> Result<Vec<Entry>, String> {
    let manifest: Manifest = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    // It covers every line before the last one.
    let without_last = text.strip_suffix(b"\n").unwrap_or(text);
    let last = without_last.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    let found = hex(digest(&SHA256, text.get(..last).unwrap_or_default()).as_ref());
    if found != manifest.checksum {
        return Err("its own checksum is wrong".to_owned());
    }
    Ok(manifest.files)
}

/// As checksums are written.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_is_read_and_no_changed_letter_passes() {
        let lines = "{ \"PostgreSQL-Backup-Manifest-Version\": 1,\n\"Files\": [\n\
            { \"Path\": \"base/1/112\", \"Size\": 8192, \"Last-Modified\": \"x\", \
            \"Checksum-Algorithm\": \"SHA256\", \"Checksum\": \"00ff\" }\n],\n";
        let sum = hex(digest(&SHA256, lines.as_bytes()).as_ref());
        let text = format!("{lines}\"Manifest-Checksum\": \"{sum}\"}}\n");
        let files = read(text.as_bytes()).unwrap();
        assert_eq!(files.len(), 1);
        assert_eq!(files[0].path.as_deref(), Some("base/1/112"));
        assert_eq!((files[0].size, files[0].checksum.as_deref()), (8_192, Some("00ff")));
        assert!(read(text.replace("8192", "8193").as_bytes()).is_err());
        assert!(read(&text.as_bytes()[..text.len() - 10]).is_err());
    }
}
