//! Accepts connections on the control socket. Administrators always have a place.

use std::os::fd::AsFd;
use std::time::Duration;

use axum::Router;
use axum::extract::connect_info::ConnectInfo;
use tokio::net::UnixListener;

use super::access::{Level, Peer, Rules};
use super::file_receiver::FileReceiver;
use crate::foreign_stream::ForeignStream;
use crate::http_server::slots::Slots;
use crate::http_server::{IDLE_TIMEOUT, ListenerLog, control_limits, serve_connection};

/// Limit of the time for the head of a request of an administrator, and without a request.
const ADMIN_IDLE_TIMEOUT: Duration = Duration::from_secs(300);

/// Answer to a connection for which there is no place.
const BUSY: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: 109\r\n\r\n{\"error\":{\"code\":\"unavailable\",\"message\":\"Too many connections of this user to vgpud are open; close some.\"}}";

/// Serves the control socket. `files` is this process' limit of open files.
pub async fn serve(listener: UnixListener, router: Router, rules: Rules, files: u64) {
    let slots = Slots::new(control_limits(files));
    let mut log = ListenerLog::new("the control socket");
    // Connections inherit that, also those that are not accepted yet.
    foreign_fds::refuse(listener.as_fd());
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => ForeignStream::from(stream),
            Err(error) => {
                log.accept_failed(&error).await;
                continue;
            }
        };
        let peer = stream.descriptor().and_then(Peer::of).unwrap_or_else(|error| {
            log::debug!("Cannot read the credentials of a client of the control socket: {error}");
            Peer::default()
        });
        let is_admin = rules.level(&peer) == Level::Admin;
        let uid = peer.uid.unwrap_or(u32::MAX);
        let Some(slot) = slots.admit(Some(uid), is_admin) else {
            log.refused(uid);
            refuse(&stream);
            continue;
        };
        let idle = if is_admin { ADMIN_IDLE_TIMEOUT } else { IDLE_TIMEOUT };
        let (stream, passed) = FileReceiver::new(stream, is_admin);
        let extend = move |extensions: &mut axum::http::Extensions| {
            extensions.insert(ConnectInfo(peer.clone()));
            extensions.insert(passed.clone());
        };
        tokio::spawn(serve_connection(stream, extend, router.clone(), slot, idle));
    }
}

/// Tells a client that there is no place for its connection, without waiting for the client.
fn refuse(stream: &ForeignStream) {
    // The client may have gone.
    let _ = stream.try_write(BUSY);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_connection_gets_a_whole_answer() {
        let text = String::from_utf8(BUSY.to_vec()).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.ends_with(&format!("Content-Length: {}", body.len())), "{}", body.len());
        let error: vgpud_api::ErrorBody = serde_json::from_str(body).unwrap();
        assert_eq!(error.error.code, vgpud_api::ErrorCode::Unavailable);
    }
}
