//! Screens, live: a request becomes a connection that speaks RFB.

use std::path::Path;

use axum::Json;
use axum::extract::{FromRequest, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use hyper_util::rt::TokioIo;
use mdev_core::ids::VgpuId;

use super::model::{ErrorCode, ErrorDetail, OpenConsole, OpenWeb, WebAddress};
use super::request::{Body, Named, Refusal};
use super::service::Api;
use crate::console::monitor::Monitor;
use crate::console::session;
use crate::manager::Result;

/// What a connection is upgraded to.
pub const PROTOCOL: &str = "rfb";

/// Opens a vGPU's screen: with `Connection: Upgrade` and `Upgrade: rfb`, this connection becomes one that serves it as
/// RFB (VNC, RFC 6143), without a password, for as long as both ends stay.
#[utoipa::path(
    post,
    path = "/v1/vgpus/{uuid}/console",
    params(("uuid" = String, Path)),
    request_body(content = Option<OpenConsole>),
    responses((status = 101, description = "From here on, RFB"), Refusal)
)]
pub async fn open(
    State(api): State<Api>,
    Named(id): Named,
    mut request: Request,
) -> Result<Response> {
    let upgrade = hyper::upgrade::on(&mut request);
    let asked = request.headers().get(header::UPGRADE);
    let asked = asked.is_some_and(|what| what.as_bytes().eq_ignore_ascii_case(PROTOCOL.as_bytes()));
    let Body(OpenConsole { monitor }) = Body::from_request(request, &api).await?;
    if !asked {
        let what = "A screen is a connection: ask with Connection: Upgrade and Upgrade: rfb";
        return Err(ErrorDetail::new(ErrorCode::Invalid, what));
    }
    let seat = api.screens.watch(id).await?;
    let monitor = match monitor {
        Some(path) => Some(api.monitor(id, &path).await?),
        None => None,
    };
    let name = screen_name(id, monitor.is_some());
    tokio::spawn(async move {
        let done = match upgrade.await {
            Ok(stream) => session::serve(TokioIo::new(stream), seat, monitor, &name).await,
            Err(error) => Err(std::io::Error::other(error)),
        };
        match done {
            Err(error) if !is_end(&error) => log::info!("A viewer of vGPU {id} is gone: {error}"),
            _ => log::debug!("A viewer of vGPU {id} has left"),
        }
    });
    let upgraded = [(header::CONNECTION, "upgrade"), (header::UPGRADE, PROTOCOL)];
    Ok((StatusCode::SWITCHING_PROTOCOLS, upgraded).into_response())
}

/// Whether an error only says that the viewer has left.
fn is_end(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

/// Lets somebody into the web console: an address that opens it, once, within five minutes.
#[utoipa::path(
    post,
    path = "/v1/web",
    request_body(content = Option<OpenWeb>),
    responses((status = 201, body = WebAddress, description = "Where to go"), Refusal)
)]
pub async fn web(
    State(api): State<Api>,
    Body(OpenWeb { monitors }): Body<OpenWeb>,
) -> Result<(StatusCode, Json<WebAddress>)> {
    let Some(access) = &api.web else {
        let what = "vgpud serves no web console; start it with --web 127.0.0.1:8006";
        return Err(ErrorDetail::new(ErrorCode::Conflict, what));
    };
    for (id, path) in &monitors {
        // Said to the operator, rather than found missing by the page.
        api.monitor(*id, path).await?.release().await;
    }
    Ok((StatusCode::CREATED, Json(WebAddress { url: access.ticket(monitors)? })))
}

/// What a viewer has in its title.
pub fn screen_name(id: VgpuId, input: bool) -> String {
    if input { format!("vGPU {id}") } else { format!("vGPU {id} (view only)") }
}

impl Api {
    /// The keyboard and pointer of the VM that a vGPU is attached to, by its monitor.
    pub async fn monitor(&self, id: VgpuId, path: &str) -> Result<Monitor> {
        if !Path::new(path).is_absolute() {
            let what = format!("{path:?} is not a whole path; begin it with a slash");
            return Err(ErrorDetail::new(ErrorCode::Invalid, what));
        }
        let vgpu = self.one(move |manager| manager.show(id)).await?;
        let Some(vm) = vgpu.vm else {
            let what = format!(
                "No VM is attached to vGPU {id}, so there is no keyboard; leave the monitor out"
            );
            return Err(ErrorDetail::new(ErrorCode::Conflict, what));
        };
        Monitor::open(Path::new(path), vm.pid).await.map_err(|error| {
            let what = format!("The monitor {path} cannot be used: {error}");
            ErrorDetail::new(ErrorCode::Conflict, what)
        })
    }
}
