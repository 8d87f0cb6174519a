//! Handlers that open a vGPU's screen and the web console.

use std::path::Path;
use std::sync::Arc;

use axum::Json;
use axum::extract::{FromRequest, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use hyper_util::rt::TokioIo;

use super::Api;
use crate::console::viewer;
use crate::http::{HttpResult, JsonBody, VgpuPath};
use crate::http_server::slots::Slot;
use crate::service::Service;
use vgpud_api::{ErrorCode, ErrorDetail, OpenConsole, OpenWeb, RFB_UPGRADE, WebAddress};

pub async fn open(
    State(service): State<Service>,
    VgpuPath(id): VgpuPath,
    mut request: Request,
) -> HttpResult<Response> {
    let upgrade = hyper::upgrade::on(&mut request);
    let place = request.extensions().get::<Arc<Slot>>().cloned();
    let requested = request.headers().get(header::UPGRADE);
    let requested =
        requested.is_some_and(|name| name.as_bytes().eq_ignore_ascii_case(RFB_UPGRADE.as_bytes()));
    let JsonBody(OpenConsole { monitor }) = JsonBody::from_request(request, &service).await?;
    if !requested {
        let message = "A screen needs the headers Connection: Upgrade and Upgrade: rfb";
        return Err(ErrorDetail::new(ErrorCode::Invalid, message).into());
    }
    let slot = service.screens.add_viewer(id).await?;
    let input = match monitor {
        Some(path) => Some(service.open_input(id, Path::new(&path)).await?),
        None => None,
    };
    let title = viewer::title(id, input.is_some());
    tokio::spawn(async move {
        let result = match upgrade.await {
            Ok(stream) => viewer::serve(TokioIo::new(stream), slot, input, &title).await,
            Err(error) => Err(std::io::Error::other(error)),
        };
        match result {
            Err(error) if !is_disconnect(&error) => {
                log::info!("A viewer of vGPU {id} was disconnected: {error}");
            }
            _ => log::debug!("A viewer of vGPU {id} has disconnected"),
        }
        drop(place);
    });
    let upgraded = [(header::CONNECTION, "upgrade"), (header::UPGRADE, RFB_UPGRADE)];
    Ok((StatusCode::SWITCHING_PROTOCOLS, upgraded).into_response())
}

/// Returns whether an error means that the viewer has closed the connection.
fn is_disconnect(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

pub async fn web(
    State(Api { service, web_sessions }): State<Api>,
    JsonBody(OpenWeb { monitors }): JsonBody<OpenWeb>,
) -> HttpResult<(StatusCode, Json<WebAddress>)> {
    let Some(sessions) = web_sessions else {
        let message = "vgpud serves no web console; start it with --web 127.0.0.1:8006";
        return Err(ErrorDetail::new(ErrorCode::Conflict, message).into());
    };
    for (id, path) in &monitors {
        // A monitor that cannot be used is reported here, not on the page later.
        service.open_input(*id, Path::new(path)).await?.release().await;
    }
    Ok((StatusCode::CREATED, Json(WebAddress { url: sessions.create_ticket(monitors)? })))
}
