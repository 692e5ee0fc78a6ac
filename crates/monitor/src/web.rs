//! The page. Its parts are in the binary: it fetches nothing from elsewhere.

use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};

const HTML: &str = include_str!("page/index.html");
const STYLE: &str = include_str!("page/style.css");
const SCRIPTS: [(&str, &str); 5] = [
    ("app.js", include_str!("page/app.js")),
    ("format.js", include_str!("page/format.js")),
    ("draw.js", include_str!("page/draw.js")),
    ("browse.js", include_str!("page/browse.js")),
    ("actions.js", include_str!("page/actions.js")),
];
const ICON: &str = include_str!("page/icon.svg");

/// A part of the page by its path, `/` for the page itself.
pub(crate) fn part(path: &str) -> Option<Response> {
    let (kind, text) = match path {
        "/" => ("text/html; charset=utf-8", HTML),
        "/style.css" => ("text/css; charset=utf-8", STYLE),
        "/icon.svg" => ("image/svg+xml", ICON),
        _ => {
            let name = path.strip_prefix('/')?;
            let (_, text) = SCRIPTS.iter().find(|(script, _)| *script == name)?;
            ("text/javascript; charset=utf-8", *text)
        }
    };
    Some(([(CONTENT_TYPE, kind)], text).into_response())
}
