//! Routes of the web console.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::JsonRejection;
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::{DefaultBodyLimit, Extension, FromRef, FromRequestParts, Path, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router, middleware};
use serde::{Deserialize, Serialize};

use super::history::{History, Snapshot};
use super::live_screen::{self, MAX_MESSAGE};
use super::request_guard::{self, Address, RequestGuard};
use super::sessions::{Monitors, SCREEN_PROTOCOL, Sessions};
use crate::console::viewer;
use crate::http::{HttpError, HttpResult, VgpuPath};
use crate::http_server::pace::Budgets;
use crate::http_server::slots::{Slot, Slots};
use crate::http_server::{
    ACCEPT_PAUSE, IDLE_TIMEOUT, ListenerLog, Terms, console_limits, serve_connection,
};
use crate::io_runtime;
use crate::service::Service;
use vgpud_api::{ErrorBody, ErrorCode, ErrorDetail};

/// Longest request body, in bytes: a ticket.
const MAX_BODY: usize = 1 << 10;

/// Limit of threads that block on a worker's reply or encode a screen.
const MAX_BLOCKING_THREADS: usize = 64;

/// Pause between attempts to listen on an address that another program has.
const LISTEN_PAUSE: Duration = Duration::from_secs(1);

/// Limit of the time in which a ticket arrives.
const SIGN_IN_TIMEOUT: Duration = Duration::from_secs(10);

/// Files of the page: path, content type and content.
const PAGE: [(&str, &str, &str); 7] = [
    ("/", "text/html; charset=utf-8", include_str!("page/index.html")),
    ("/icon.svg", "image/svg+xml", include_str!("page/icon.svg")),
    ("/console.css", "text/css; charset=utf-8", include_str!("page/console.css")),
    ("/console.js", "text/javascript; charset=utf-8", include_str!("page/console.js")),
    ("/cards.js", "text/javascript; charset=utf-8", include_str!("page/cards.js")),
    ("/rfb.js", "text/javascript; charset=utf-8", include_str!("page/rfb.js")),
    ("/keys.js", "text/javascript; charset=utf-8", include_str!("page/keys.js")),
];

/// State of the handlers.
#[derive(Clone, Debug)]
struct Console {
    sessions: Arc<Sessions>,
    history: Arc<History>,
    service: Service,
}

impl FromRef<Console> for Service {
    fn from_ref(console: &Console) -> Self {
        console.service.clone()
    }
}

/// Starts the console's server, on a thread of its own: any user of the host can connect. Without a
/// listener, the address is tried again until it is free. `files` is this process' limit of open
/// files.
pub fn serve(
    listener: Option<TcpListener>,
    service: Service,
    sessions: Arc<Sessions>,
    files: u64,
) -> std::io::Result<()> {
    let runtime = io_runtime::start("console", MAX_BLOCKING_THREADS)?;
    let _context = runtime.enter();
    let listener = listener.map(from_std).transpose()?;
    let history = Arc::new(History::default());
    tokio::spawn(Arc::clone(&history).record(service.clone()));
    let console = Console { sessions, history, service };
    tokio::spawn(async move {
        let listener = match listener {
            Some(listener) => listener,
            None => listen_later(&console.sessions).await,
        };
        log::info!(
            "Serving the web console on {}; vgpuctl web opens it",
            console.sessions.address()
        );
        console.sessions.set_failure(None);
        accept(listener, router(console), files).await;
    });
    Ok(())
}

fn from_std(listener: TcpListener) -> std::io::Result<tokio::net::TcpListener> {
    listener.set_nonblocking(true)?;
    tokio::net::TcpListener::from_std(listener)
}

/// Accepts connections. One with a session is not closed for another.
async fn accept(listener: tokio::net::TcpListener, router: Router, files: u64) {
    let slots = Slots::new(console_limits(files));
    let budgets = Budgets::default();
    let mut log = ListenerLog::new("the web console");
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                if let Some(slot) = slots.admit(None, false) {
                    let router = router.clone();
                    let terms = Terms { idle: IDLE_TIMEOUT, pace: Some(budgets.pace(None)) };
                    tokio::spawn(serve_connection(stream, |_| (), router, slot, terms));
                }
            }
            Err(error) => {
                log.accept_failed(&error);
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Listens on the console's address as soon as it is free.
async fn listen_later(sessions: &Sessions) -> tokio::net::TcpListener {
    loop {
        tokio::time::sleep(LISTEN_PAUSE).await;
        match tokio::net::TcpListener::bind(sessions.address()).await {
            Ok(listener) => return listener,
            Err(error) => sessions.set_failure(Some(error.to_string())),
        }
    }
}

/// Listens on the console's address.
pub fn listen(address: Address) -> std::io::Result<TcpListener> {
    TcpListener::bind(address.0)
}

fn router(console: Console) -> Router {
    let mut router = Router::new()
        .route("/api/enter", post(sign_in).layer(middleware::from_fn(in_time)))
        .route("/api/state/{sample}/{event}", get(state))
        .route("/api/vgpus/{vgpu}/thumbnail", get(thumbnail))
        .route("/api/vgpus/{vgpu}/screen", get(live_screen))
        .fallback(no_such_page)
        .layer(DefaultBodyLimit::max(MAX_BODY));
    for (path, kind, text) in PAGE {
        router = router.route(path, get(([(header::CONTENT_TYPE, kind)], text)));
    }
    let guard = RequestGuard::new(console.sessions.address());
    router
        .layer(middleware::from_fn_with_state(guard, request_guard::check))
        .layer(middleware::from_fn(close_without_session))
        .with_state(console)
}

/// Ends a connection after its first request, unless that has a session. Who has none can then not
/// send more requests than new connections are served.
async fn close_without_session(request: Request, next: middleware::Next) -> Response {
    let place = request.extensions().get::<Arc<Slot>>().cloned();
    let mut response = next.run(request).await;
    if !place.is_some_and(|place| place.is_privileged()) {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// Ends a request whose body does not arrive.
async fn in_time(request: Request, next: middleware::Next) -> Response {
    match tokio::time::timeout(SIGN_IN_TIMEOUT, next.run(request)).await {
        Ok(response) => response,
        Err(_) => StatusCode::REQUEST_TIMEOUT.into_response(),
    }
}

async fn no_such_page() -> HttpError {
    ErrorDetail::new(ErrorCode::NotFound, "There is no such page in this console").into()
}

/// Session of a request. Extraction fails without a session.
struct Session(Arc<Monitors>);

impl FromRequestParts<Console> for Session {
    type Rejection = Response;

    async fn from_request_parts(
        parts: &mut Parts,
        console: &Console,
    ) -> std::result::Result<Self, Response> {
        let refused = |status: StatusCode, code, message: &str| {
            let error = ErrorDetail::new(code, message);
            (status, Json(ErrorBody { error })).into_response()
        };
        let Some((session, monitors)) = console.sessions.find(&parts.headers) else {
            let message = "This session has ended; get a new address with vgpuctl web";
            return Err(refused(StatusCode::UNAUTHORIZED, ErrorCode::Invalid, message));
        };
        let slot = parts.extensions.get::<Arc<Slot>>();
        if slot.is_some_and(|slot| !slot.give_to_session(session)) {
            let message = "This session has too many connections; close some screens";
            let busy = StatusCode::SERVICE_UNAVAILABLE;
            return Err(refused(busy, ErrorCode::Unavailable, message));
        }
        Ok(Self(monitors))
    }
}

#[derive(Deserialize)]
struct SignIn {
    ticket: String,
}

#[derive(Serialize)]
struct SignedIn {
    session: String,
}

async fn sign_in(
    State(console): State<Console>,
    body: std::result::Result<Json<SignIn>, JsonRejection>,
) -> Response {
    let result = match body {
        Ok(Json(SignIn { ticket })) => console.sessions.open(&ticket),
        Err(error) => Err(ErrorDetail::new(ErrorCode::Invalid, error.body_text())),
    };
    match result {
        Ok(session) => Json(SignedIn { session }).into_response(),
        Err(error) => (StatusCode::UNAUTHORIZED, Json(ErrorBody { error })).into_response(),
    }
}

/// Returns the state, with samples and events after the given numbers.
async fn state(
    _session: Session,
    State(console): State<Console>,
    Path((sample, event)): Path<(u64, u64)>,
) -> Json<Snapshot> {
    Json(console.history.since(sample, event))
}

async fn thumbnail(
    _session: Session,
    State(console): State<Console>,
    VgpuPath(id): VgpuPath,
) -> HttpResult<Response> {
    let screen = console.service.call(move |manager| manager.screen(id)).await?;
    let png = console.service.thumbnails.thumbnail(id, screen).await?;
    if png.is_empty() {
        return Ok(StatusCode::NO_CONTENT.into_response());
    }
    Ok(([(header::CONTENT_TYPE, "image/png")], png).into_response())
}

async fn live_screen(
    Session(monitors): Session,
    State(console): State<Console>,
    VgpuPath(id): VgpuPath,
    place: Option<Extension<Arc<Slot>>>,
    upgrade: WebSocketUpgrade,
) -> HttpResult<Response> {
    let slot = console.service.screens.add_viewer(id).await?;
    let input = match monitors.get(&id) {
        // A screen without a keyboard is still useful.
        Some(path) => match console.service.open_input(id, path.as_ref()).await {
            Ok(input) => Some(input),
            Err(error) => {
                log::warn!("vGPU {id} is shown without keyboard and pointer: {error}");
                None
            }
        },
        None => None,
    };
    let title = viewer::title(id, input.is_some());
    let upgrade = upgrade.protocols([SCREEN_PROTOCOL]).max_message_size(MAX_MESSAGE);
    Ok(upgrade.on_upgrade(move |socket| async move {
        live_screen::serve(socket, slot, input, title).await;
        drop(place);
    }))
}
