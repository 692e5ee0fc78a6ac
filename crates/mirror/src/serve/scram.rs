//! The server's side of SCRAM-SHA-256 (RFC 5802, RFC 7677), as PostgreSQL speaks it: the name in
//! the exchange is passed over, and channel binding is `tls-server-end-point` (RFC 5929).
//!
//! Pure but for the randomness it is given: messages in, messages out.

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use ring::digest::{SHA256, digest};
use ring::{hmac, pbkdf2};
use std::num::NonZeroU32;

/// The mechanism without channel binding.
pub(super) const PLAIN: &str = "SCRAM-SHA-256";
/// The mechanism with channel binding.
pub(super) const PLUS: &str = "SCRAM-SHA-256-PLUS";

/// Rounds of hashing, as PostgreSQL has it by default.
const ITERATIONS: NonZeroU32 = NonZeroU32::new(4_096).unwrap();
const HASH_BYTES: usize = 32;

/// Random bytes of a salt.
pub(super) type Salt = [u8; 16];
/// Random bytes of the server's part of a nonce.
pub(super) type Nonce = [u8; 18];

/// What is kept of a password.
pub(super) struct Verifier {
    salt: Salt,
    stored_key: [u8; HASH_BYTES],
    server_key: hmac::Key,
}

impl Verifier {
    /// Takes some milliseconds.
    pub fn new(password: &[u8], salt: Salt) -> Verifier {
        let mut salted = [0; HASH_BYTES];
        pbkdf2::derive(pbkdf2::PBKDF2_HMAC_SHA256, ITERATIONS, &salt, password, &mut salted);
        let salted = hmac::Key::new(hmac::HMAC_SHA256, &salted);
        let client_key = hmac::sign(&salted, b"Client Key");
        let mut stored_key = [0; HASH_BYTES];
        stored_key.copy_from_slice(digest(&SHA256, client_key.as_ref()).as_ref());
        let server_key = hmac::sign(&salted, b"Server Key");
        let server_key = hmac::Key::new(hmac::HMAC_SHA256, server_key.as_ref());
        Verifier { salt, stored_key, server_key }
    }
}

/// Why a client is not let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Denied {
    /// It does not know the password.
    #[error("the password is wrong")]
    Password,
    /// What it says is no SCRAM.
    #[error("what it says is not SCRAM: {0}")]
    Malformed(&'static str),
    /// Something between the two ends has changed the list of mechanisms, or ends TLS.
    #[error("channel binding does not hold: {0}")]
    Binding(&'static str),
}

/// An exchange whose first message has come.
#[derive(Debug)]
pub(super) struct Challenged {
    /// What the client repeats of the channel: the header and, bound, the certificate's hash.
    channel: Vec<u8>,
    nonce: String,
    /// `client-first-message-bare,server-first-message`.
    said: String,
}

/// Takes the client's first message, sent for `mechanism`; `end_point` is the certificate's hash,
/// if TLS is in use and has one. Gives what is to be answered.
pub(super) fn challenge(
    verifier: &Verifier,
    mechanism: &str,
    first: &[u8],
    end_point: Option<&[u8]>,
    nonce: &Nonce,
) -> Result<(Challenged, String), Denied> {
    let first = text(first)?;
    let is_bound = match (mechanism, end_point) {
        (PLAIN, _) => false,
        (PLUS, Some(_)) => true,
        _ => return Err(Denied::Malformed("a mechanism that was not offered")),
    };
    let mut fields = first.splitn(3, ',');
    let (flag, name) = (fields.next().unwrap_or_default(), fields.next());
    let bare = fields.next().ok_or(Denied::Malformed("the first message ends early"))?;
    match flag {
        "n" if !is_bound => {}
        // It could have, and believes that this server cannot.
        "y" if end_point.is_none() => {}
        "y" => return Err(Denied::Binding("it was not told that it is offered")),
        "p=tls-server-end-point" if is_bound => {}
        _ => return Err(Denied::Binding("its kind is not what was offered")),
    }
    if name != Some("") {
        return Err(Denied::Malformed("a name to act as"));
    }
    let mut attributes = bare.split(',');
    if !attributes.next().is_some_and(|user| user.starts_with("n=")) {
        return Err(Denied::Malformed("no user, or an extension that is not known"));
    }
    let of_client = attributes.next().and_then(|nonce| nonce.strip_prefix("r="));
    let of_client = of_client.filter(|nonce| !nonce.is_empty());
    let of_client = of_client.ok_or(Denied::Malformed("no nonce"))?;
    let mut channel = format!("{flag},,").into_bytes();
    channel.extend_from_slice(end_point.filter(|_| is_bound).unwrap_or_default());
    let nonce = format!("{of_client}{}", BASE64.encode(nonce));
    let answer = format!("r={nonce},s={},i={ITERATIONS}", BASE64.encode(verifier.salt));
    let said = format!("{bare},{answer}");
    Ok((Challenged { channel, nonce, said }, answer))
}

impl Challenged {
    /// Takes the client's last message. Gives the server's own proof, if the client has the
    /// password.
    pub fn prove(self, verifier: &Verifier, last: &[u8]) -> Result<String, Denied> {
        let last = text(last)?;
        let (without_proof, proof) =
            last.rsplit_once(",p=").ok_or(Denied::Malformed("no proof"))?;
        let mut attributes = without_proof.split(',');
        let channel = attributes.next().and_then(|channel| channel.strip_prefix("c="));
        let channel = channel.and_then(|channel| BASE64.decode(channel).ok());
        if channel.ok_or(Denied::Malformed("no channel"))? != self.channel {
            return Err(Denied::Binding("it sees another certificate, or another offer"));
        }
        if attributes.next().and_then(|nonce| nonce.strip_prefix("r=")) != Some(&self.nonce) {
            return Err(Denied::Malformed("another nonce"));
        }
        let proof = BASE64.decode(proof).map_err(|_| Denied::Malformed("its proof"))?;
        let proof: [u8; HASH_BYTES] =
            proof.try_into().map_err(|_| Denied::Malformed("its proof's length"))?;
        let said = format!("{},{without_proof}", self.said);
        let stored_key = hmac::Key::new(hmac::HMAC_SHA256, &verifier.stored_key);
        let signature = hmac::sign(&stored_key, said.as_bytes());
        let mut client_key = proof;
        for (byte, of_signature) in client_key.iter_mut().zip(signature.as_ref()) {
            *byte ^= of_signature;
        }
        let found = digest(&SHA256, &client_key);
        // All of it, however early it differs: the time says nothing.
        let pairs = found.as_ref().iter().zip(&verifier.stored_key);
        if pairs.fold(0, |differs, (found, kept)| differs | (found ^ kept)) != 0 {
            return Err(Denied::Password);
        }
        let signature = hmac::sign(&verifier.server_key, said.as_bytes());
        Ok(format!("v={}", BASE64.encode(signature)))
    }
}

fn text(message: &[u8]) -> Result<&str, Denied> {
    std::str::from_utf8(message).map_err(|_| Denied::Malformed("it is not text"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SALT: Salt = [7; 16];
    const NONCE: Nonce = [9; 18];

    /// A client that knows `password`; what the server makes of it. `seen` is the certificate's
    /// hash as the client sees it.
    fn exchange(
        password: &str,
        mechanism: &str,
        (flag, seen): (&str, &[u8]),
        offered: Option<&[u8]>,
    ) -> Result<(), Denied> {
        let verifier = Verifier::new(b"secret", SALT);
        let bare = "n=,r=abc";
        let first = format!("{flag},,{bare}");
        let (challenged, answer) =
            challenge(&verifier, mechanism, first.as_bytes(), offered, &NONCE)?;
        let nonce = answer.split(',').next().unwrap();
        let channel = [format!("{flag},,").as_bytes(), seen].concat();
        let without_proof = format!("c={},{nonce}", BASE64.encode(channel));
        let mut salted = [0; HASH_BYTES];
        let password = password.as_bytes();
        pbkdf2::derive(pbkdf2::PBKDF2_HMAC_SHA256, ITERATIONS, &SALT, password, &mut salted);
        let salted = hmac::Key::new(hmac::HMAC_SHA256, &salted);
        let client_key = hmac::sign(&salted, b"Client Key");
        let stored_key = digest(&SHA256, client_key.as_ref());
        let said = format!("{bare},{answer},{without_proof}");
        let key = hmac::Key::new(hmac::HMAC_SHA256, stored_key.as_ref());
        let signature = hmac::sign(&key, said.as_bytes());
        let proof: Vec<u8> =
            client_key.as_ref().iter().zip(signature.as_ref()).map(|(a, b)| a ^ b).collect();
        let last = format!("{without_proof},p={}", BASE64.encode(proof));
        let proven = challenged.prove(&verifier, last.as_bytes())?;
        let server_key = hmac::sign(&salted, b"Server Key");
        let server_key = hmac::Key::new(hmac::HMAC_SHA256, server_key.as_ref());
        let expected = hmac::sign(&server_key, said.as_bytes());
        assert_eq!(proven, format!("v={}", BASE64.encode(expected)));
        Ok(())
    }

    #[test]
    fn who_knows_the_password_is_let_in_and_nobody_else() {
        let hash = [1; 32];
        assert_eq!(exchange("secret", PLAIN, ("n", b""), None), Ok(()));
        assert_eq!(exchange("secret", PLAIN, ("y", b""), None), Ok(()));
        assert_eq!(exchange("secret", PLAIN, ("n", b""), Some(&hash)), Ok(()));
        let bound = "p=tls-server-end-point";
        assert_eq!(exchange("secret", PLUS, (bound, &hash), Some(&hash)), Ok(()));
        assert_eq!(exchange("Secret", PLAIN, ("n", b""), None), Err(Denied::Password));
        assert_eq!(exchange("", PLUS, (bound, &hash), Some(&hash)), Err(Denied::Password));
    }

    #[test]
    fn a_channel_that_is_not_the_same_at_both_ends_is_refused() {
        let (hash, other) = ([1; 32], [2; 32]);
        let bound = "p=tls-server-end-point";
        let denied = |result: Result<(), Denied>| matches!(result, Err(Denied::Binding(_)));
        assert!(denied(exchange("secret", PLUS, (bound, &other), Some(&hash))));
        assert!(denied(exchange("secret", PLAIN, ("y", b""), Some(&hash))), "offers were hidden");
        assert!(denied(exchange("secret", PLUS, ("n", b""), Some(&hash))));
        assert!(denied(exchange("secret", PLAIN, (bound, &hash), Some(&hash))));
        assert!(denied(exchange("secret", PLUS, ("p=tls-unique", &hash), Some(&hash))));
        assert!(exchange("secret", PLUS, (bound, &hash), None).is_err(), "not offered");
    }

    #[test]
    fn what_is_no_scram_is_refused() {
        let verifier = Verifier::new(b"secret", SALT);
        let first = |text: &[u8]| challenge(&verifier, PLAIN, text, None, &NONCE);
        for text in [
            &b""[..],
            b"n",
            b"n,,",
            b"n,,n=",
            b"n,,n=,r=",
            b"n,,m=x,n=,r=a",
            b"n,a=b,n=,r=a",
            b"x,,n=,r=a",
            b"\xff,,n=,r=a",
            b"n,,r=a",
        ] {
            assert!(first(text).is_err(), "{text:?}");
        }
        assert!(challenge(&verifier, "PLAIN", b"n,,n=,r=a", None, &NONCE).is_err());
        let server = BASE64.encode(NONCE);
        for last in [
            String::new(),
            "c=biws,r=a".to_owned(),
            format!("c=biws,r=a{server},p="),
            format!("c=biws,r=a{server},p=AAAA"),
            format!("c=!,r=a{server},p={}", BASE64.encode([0; 32])),
            format!("c=biws,r=b{server},p={}", BASE64.encode([0; 32])),
            format!("c=biws,r=a{server},p={}", BASE64.encode([0; 32])),
        ] {
            let (challenged, _) = first(b"n,,n=,r=a").unwrap();
            assert!(challenged.prove(&verifier, last.as_bytes()).is_err(), "{last}");
        }
    }
}
