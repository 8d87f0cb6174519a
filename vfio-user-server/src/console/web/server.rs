//! The console's paths.

use std::net::TcpListener;
use std::sync::Arc;

use axum::extract::rejection::JsonRejection;
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::{DefaultBodyLimit, FromRequestParts, Path, State};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router, middleware};
use serde::{Deserialize, Serialize};

use super::access::{Access, Address, Monitors, SCREEN, guard};
use super::history::{History, Told};
use super::screen::{self, MAX_MESSAGE};
use crate::api::consoles::screen_name;
use crate::api::model::{ErrorBody, ErrorCode, ErrorDetail};
use crate::api::request::Named;
use crate::api::service::Api;
use crate::manager::Result;

/// The longest body: a ticket.
const MAX_BODY: usize = 1 << 10;

/// The page and all that belongs to it, in the binary.
const PAGE: [(&str, &str, &str); 7] = [
    ("/", "text/html; charset=utf-8", include_str!("page/index.html")),
    ("/icon.svg", "image/svg+xml", include_str!("page/icon.svg")),
    ("/console.css", "text/css; charset=utf-8", include_str!("page/console.css")),
    ("/console.js", "text/javascript; charset=utf-8", include_str!("page/console.js")),
    ("/cards.js", "text/javascript; charset=utf-8", include_str!("page/cards.js")),
    ("/rfb.js", "text/javascript; charset=utf-8", include_str!("page/rfb.js")),
    ("/keys.js", "text/javascript; charset=utf-8", include_str!("page/keys.js")),
];

/// What the console's paths have.
#[derive(Clone, Debug)]
struct Console {
    access: Arc<Access>,
    history: Arc<History>,
    api: Api,
}

/// Begins to serve the console. It runs for as long as the runtime does.
pub fn serve(listener: TcpListener, api: Api, access: Arc<Access>) -> std::io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let history = Arc::new(History::default());
    tokio::spawn(Arc::clone(&history).keep(api.clone()));
    let console = Console { access, history, api };
    tokio::spawn(async move { axum::serve(listener, router(console)).await });
    Ok(())
}

/// Listens where the console is to be.
pub fn listen(address: Address) -> std::io::Result<TcpListener> {
    TcpListener::bind(address.0)
}

fn router(console: Console) -> Router {
    let mut router = Router::new()
        .route("/api/enter", post(enter))
        .route("/api/state/{sample}/{event}", get(state))
        .route("/api/vgpus/{uuid}/thumbnail", get(thumbnail))
        .route("/api/vgpus/{uuid}/screen", get(live))
        .fallback(nothing)
        .layer(DefaultBodyLimit::max(MAX_BODY));
    for (path, kind, text) in PAGE {
        router = router.route(path, get(([(header::CONTENT_TYPE, kind)], text)));
    }
    let access = Arc::clone(&console.access);
    router.layer(middleware::from_fn_with_state(access, guard)).with_state(console)
}

async fn nothing() -> ErrorDetail {
    ErrorDetail::new(ErrorCode::NotFound, "There is no such page in this console")
}

/// What the page's session may do. A request without one gets nowhere.
struct Session(Arc<Monitors>);

impl FromRequestParts<Console> for Session {
    type Rejection = Response;

    async fn from_request_parts(
        parts: &mut Parts,
        console: &Console,
    ) -> std::result::Result<Self, Response> {
        console.access.session(&parts.headers).map(Self).ok_or_else(|| {
            let what = "This session has ended; get a new address with vgpuctl web";
            let error = ErrorDetail::new(ErrorCode::Invalid, what);
            (StatusCode::UNAUTHORIZED, Json(ErrorBody { error })).into_response()
        })
    }
}

#[derive(Deserialize)]
struct Enter {
    ticket: String,
}

#[derive(Serialize)]
struct Entered {
    session: String,
}

async fn enter(
    State(console): State<Console>,
    body: std::result::Result<Json<Enter>, JsonRejection>,
) -> Response {
    let entered = match body {
        Ok(Json(Enter { ticket })) => console.access.enter(&ticket),
        Err(error) => Err(ErrorDetail::new(ErrorCode::Invalid, error.body_text())),
    };
    match entered {
        Ok(session) => Json(Entered { session }).into_response(),
        Err(error) => (StatusCode::UNAUTHORIZED, Json(ErrorBody { error })).into_response(),
    }
}

/// What a page is told that has seen all up to a sample and an event.
async fn state(
    _session: Session,
    State(console): State<Console>,
    Path((sample, event)): Path<(u64, u64)>,
) -> Json<Told> {
    Json(console.history.tell(sample, event))
}

async fn thumbnail(
    _session: Session,
    State(console): State<Console>,
    Named(id): Named,
) -> Result<Response> {
    let screen = console.api.ask(move |manager| manager.screen(id)).await?;
    let png = console.api.thumbnails.take_with(id, screen, screen::thumbnail).await?;
    if png.is_empty() {
        return Ok(StatusCode::NO_CONTENT.into_response());
    }
    Ok(([(header::CONTENT_TYPE, "image/png")], png).into_response())
}

async fn live(
    Session(monitors): Session,
    State(console): State<Console>,
    Named(id): Named,
    upgrade: WebSocketUpgrade,
) -> Result<Response> {
    let seat = console.api.screens.watch(id).await?;
    let monitor = match monitors.get(&id) {
        // A VM without its keyboard can still be watched.
        Some(path) => match console.api.monitor(id, path).await {
            Ok(monitor) => Some(monitor),
            Err(error) => {
                log::warn!("vGPU {id} is shown without a keyboard: {error}");
                None
            }
        },
        None => None,
    };
    let name = screen_name(id, monitor.is_some());
    let upgrade = upgrade.protocols([SCREEN]).max_message_size(MAX_MESSAGE);
    Ok(upgrade.on_upgrade(move |socket| screen::serve(socket, seat, monitor, name)))
}
