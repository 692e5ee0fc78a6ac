//! Who may ask, and what browsers may do with the answers.

use axum::extract::{Request, State};
use axum::http::header::{
    AUTHORIZATION, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HOST, HeaderName,
    HeaderValue, ORIGIN, REFERRER_POLICY, WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS,
    X_FRAME_OPTIONS,
};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use ring::digest::{SHA256, digest};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};

/// The header that every action carries: no form and no link of another page can set it.
pub(crate) const ACTION_HEADER: HeaderName = HeaderName::from_static("x-farshore-action");

/// Everything comes from the page's own origin, and no page may frame it.
const POLICY: &str = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; \
                      form-action 'none'; object-src 'none'";

/// A token, which may be replaced. Clones are replaced together.
#[derive(Clone)]
pub(crate) struct Token {
    /// Its SHA-256. Hashes are compared, so that time tells nothing of the token.
    hash: Arc<Mutex<[u8; 32]>>,
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("(hidden)")
    }
}

impl Token {
    pub fn new(token: &str) -> Token {
        Token { hash: Arc::new(Mutex::new(hashed(token.as_bytes()))) }
    }

    fn hash(&self) -> MutexGuard<'_, [u8; 32]> {
        self.hash.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// From now on this one is asked for. Whether that is another one than before.
    pub fn replace(&self, token: &str) -> bool {
        let new = hashed(token.as_bytes());
        std::mem::replace(&mut *self.hash(), new) != new
    }

    pub fn is(&self, given: &[u8]) -> bool {
        *self.hash() == hashed(given)
    }
}

/// What is asked of those who ask.
#[derive(Clone, Debug)]
pub(crate) struct Guard {
    token: Option<Token>,
    tls: bool,
}

impl Guard {
    /// Asks for `token`, if there is one.
    pub fn new(token: Option<Token>, tls: bool) -> Guard {
        Guard { token, tls }
    }

    fn refusal(&self, method: &Method, headers: &HeaderMap) -> Option<Response> {
        let host = headers.get(HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
        // Without a token, a page of another name that was made to resolve to this address must
        // not read what is here.
        if self.token.is_none() && !is_own_name(host) {
            let what = "the monitor answers to localhost and to addresses, not to names";
            return Some((StatusCode::MISDIRECTED_REQUEST, what).into_response());
        }
        if let Some(token) = &self.token
            && !given_token(headers).is_some_and(|given| token.is(&given))
        {
            let ask = [(WWW_AUTHENTICATE, "Basic realm=\"farshore\", charset=\"UTF-8\"")];
            let what = "the monitor asks for a token: as password (any name), or as bearer";
            return Some((StatusCode::UNAUTHORIZED, ask, what).into_response());
        }
        if *method == Method::GET || *method == Method::HEAD {
            return None;
        }
        if !self.is_own_action(host, headers) {
            let what = "an action needs the header x-farshore-action, content type \
                        application/json, and the monitor's own origin";
            return Some((StatusCode::FORBIDDEN, what).into_response());
        }
        None
    }

    fn is_own_action(&self, host: &str, headers: &HeaderMap) -> bool {
        let text = |name: &HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
        let scheme = if self.tls { "https" } else { "http" };
        let own_origin = text(&ORIGIN).is_none_or(|origin| origin == format!("{scheme}://{host}"));
        let json = text(&CONTENT_TYPE).is_some_and(|kind| kind.starts_with("application/json"));
        headers.contains_key(ACTION_HEADER) && own_origin && json && is_same_site(headers)
    }
}

/// Whether the monitor's own page, or a person, had a request made: browsers tell.
pub(crate) fn is_same_site(headers: &HeaderMap) -> bool {
    let site = headers.get(HeaderName::from_static("sec-fetch-site"));
    site.is_none_or(|site| site == "same-origin" || site == "none")
}

/// `Bearer TOKEN`, or the password of `Basic`, which browsers ask a person for.
fn given_token(headers: &HeaderMap) -> Option<Vec<u8>> {
    let value = headers.get(AUTHORIZATION)?.to_str().ok()?;
    let (scheme, rest) = value.split_once(' ')?;
    if scheme.eq_ignore_ascii_case("bearer") {
        return Some(rest.trim().as_bytes().to_vec());
    }
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let pair = from_base64(rest.trim())?;
    let colon = pair.iter().position(|byte| *byte == b':')?;
    Some(pair[colon + 1..].to_vec())
}

fn from_base64(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut held) = (0_u32, 0);
    for character in text.trim_end_matches('=').bytes() {
        let value = match character {
            b'A'..=b'Z' => character - b'A',
            b'a'..=b'z' => character - b'a' + 26,
            b'0'..=b'9' => character - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        held += 6;
        if held >= 8 {
            held -= 8;
            bytes.push((bits >> held) as u8);
        }
    }
    Some(bytes)
}

fn hashed(token: &[u8]) -> [u8; 32] {
    let mut hash = [0; 32];
    hash.copy_from_slice(digest(&SHA256, token).as_ref());
    hash
}

/// `localhost`, or an address: no other name can lead here by rebinding.
fn is_own_name(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.rsplit_once(':').map_or(host, |(name, _port)| name),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
}

/// Stands before every route.
pub(crate) async fn stand(
    State(guard): State<Arc<Guard>>,
    request: Request,
    next: Next,
) -> Response {
    let mut response = match guard.refusal(request.method(), request.headers()) {
        Some(refusal) => refusal,
        None => next.run(request).await,
    };
    let headers = response.headers_mut();
    for (name, value) in [
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (X_FRAME_OPTIONS, "DENY"),
        (REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (CACHE_CONTROL, "no-store"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_own_names_lead_here() {
        for host in ["localhost", "localhost:7480", "127.0.0.1:1", "[::1]:7480", "10.0.0.1"] {
            assert!(is_own_name(host), "{host}");
        }
        for host in ["", "evil.example", "evil.example:7480", "localhost.evil.example", "[x]:1"] {
            assert!(!is_own_name(host), "{host}");
        }
    }

    #[test]
    fn base64_is_read() {
        assert_eq!(from_base64("YTpnZWhlaW0="), Some(b"a:geheim".to_vec()));
        assert_eq!(from_base64("YTpnZWhlaW0x"), Some(b"a:geheim1".to_vec()));
        assert_eq!(from_base64("YTpn!"), None);
    }
}
