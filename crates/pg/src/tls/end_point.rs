//! Channel binding `tls-server-end-point` (RFC 5929, section 4): the hash of the server's
//! certificate, by the hash function of the certificate's own signature.

use ring::digest::{Algorithm, SHA256, SHA384, SHA512, digest};

/// The certificate's hash; `None` where RFC 5929 defines none (Ed25519), or for RSASSA-PSS, whose
/// hash is a parameter that servers before PostgreSQL 16 do not look at either.
pub fn hash(certificate: &[u8]) -> Option<Vec<u8>> {
    let algorithm = match signature_algorithm(certificate)? {
        // PKCS #1 v1.5: MD5 and SHA-1 are replaced by SHA-256.
        [0x2A, 0x86, 0x48, 0x86, 0xF7, 0x0D, 0x01, 0x01, last] => match last {
            0x04 | 0x05 | 0x0B => &SHA256,
            0x0C => &SHA384,
            0x0D => &SHA512,
            _ => return None,
        },
        // ecdsa-with-SHA1
        [0x2A, 0x86, 0x48, 0xCE, 0x3D, 0x04, 0x01] => &SHA256,
        [0x2A, 0x86, 0x48, 0xCE, 0x3D, 0x04, 0x03, last] => match last {
            0x02 => &SHA256,
            0x03 => &SHA384,
            0x04 => &SHA512,
            _ => return None,
        },
        _ => return None,
    };
    Some(hash_by(algorithm, certificate))
}

fn hash_by(algorithm: &'static Algorithm, certificate: &[u8]) -> Vec<u8> {
    digest(algorithm, certificate).as_ref().to_vec()
}

const SEQUENCE: u8 = 0x30;
const OBJECT_IDENTIFIER: u8 = 0x06;

/// `Certificate ::= SEQUENCE { tbsCertificate, signatureAlgorithm SEQUENCE { OID, … }, … }`
fn signature_algorithm(certificate: &[u8]) -> Option<&[u8]> {
    let (certificate, _) = element(certificate, SEQUENCE)?;
    let (_, rest) = element(certificate, SEQUENCE)?;
    let (identifier, _) = element(rest, SEQUENCE)?;
    Some(element(identifier, OBJECT_IDENTIFIER)?.0)
}

/// A DER element's content, and what follows it.
fn element(bytes: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (&found, rest) = bytes.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (length, rest) = if first < 0x80 {
        (usize::from(first), rest)
    } else {
        let (length, rest) = rest.split_at_checked(usize::from(first & 0x7F))?;
        if !(1..=4).contains(&length.len()) {
            return None;
        }
        (length.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte)), rest)
    };
    if found != tag { None } else { rest.split_at_checked(length) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_bytes_make_it_panic() {
        for bytes in [&b""[..], b"\x30", b"\x30\x80", b"\x30\xff\xff", b"\x30\x84\xff\xff\xff\xff"]
        {
            assert_eq!(hash(bytes), None);
        }
        let ecdsa_sha384 = b"\x30\x0e\x30\x00\x30\x0a\x06\x08\x2a\x86\x48\xce\x3d\x04\x03\x03";
        assert_eq!(hash(ecdsa_sha384).map(|hash| hash.len()), Some(48));
        for cut in 0..ecdsa_sha384.len() {
            assert_eq!(hash(&ecdsa_sha384[..cut]), None);
        }
    }
}
