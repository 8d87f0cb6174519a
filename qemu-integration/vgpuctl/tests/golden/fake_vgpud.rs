//! Fake vgpud, which plays back responses and records requests.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::responses::{
    DEFINED, ON_SCREEN, PROGRAMS, RUNNING, SCREEN, TRANSIENT, decisions, parent,
    parent_with_screen, refused, scheduler, screen, stats, types, vgpus, with_programs,
};

/// Requests that change something, in order.
pub type Requests = Arc<Mutex<Vec<String>>>;

/// Returns the refusal of a request to open a screen.
fn no_screen(uuid: &str, body: &[u8]) -> (u16, Value) {
    match uuid {
        RUNNING if body.windows(8).any(|word| word == b"qmp.sock") => {
            (409, refused("conflict", "The monitor /qmp.sock cannot be used: Connection refused"))
        }
        RUNNING => (409, refused("no_room", "vGPU X already has 8 viewers; close one first")),
        TRANSIENT => (409, refused("conflict", "vGPU X has no display head; types that end in Q")),
        DEFINED => (409, refused("conflict", "vGPU X is not running")),
        _ => (404, refused("not_found", "There is no vGPU X; `vgpuctl list` names those")),
    }
}

/// Answers a request for a checkpoint.
fn checkpoint(uuid: &str) -> (u16, Value) {
    if uuid == RUNNING {
        return (200, json!({ "done": true }));
    }
    let message = "The vGPU cannot be saved: the VM does not checkpoint its CUDA programs: process 7 \
                   (\"train\"): lock failed: timeout";
    (409, refused("conflict", message))
}

/// Answers a request.
async fn answer(
    State(requests): State<Requests>,
    method: Method,
    uri: Uri,
    body: Bytes,
) -> Response {
    let path = uri.path();
    if method != Method::GET {
        let body = String::from_utf8_lossy(&body).into_owned();
        requests.lock().unwrap().push(format!("{method} {path} {body}"));
    }
    let all = vgpus();
    let find = |asked: &str| {
        let is = |vgpu: &&Value| vgpu["uuid"] == asked || vgpu["name"] == asked;
        all.as_array().unwrap().iter().find(is).cloned()
    };
    let vgpu_path = path.strip_prefix("/v1/vgpus/").unwrap_or_default();
    let uuid = vgpu_path.split('/').next().unwrap_or_default();
    let (status, value) = match (method.as_str(), path) {
        ("GET", "/v1/types") => (200, types()),
        ("GET", "/v1/stats") => (200, stats()),
        ("GET", "/v1/schedulers") => (200, json!([scheduler("soft0"), scheduler("soft1")])),
        ("GET", "/v1/schedulers/soft0/log") => (200, decisions()),
        ("PATCH", "/v1/schedulers/soft0") if body.starts_with(b"{\"timeslice_us\":50,") => {
            (400, refused("invalid", "A time slice is 0.1 to 30 ms, not 0.05 ms"))
        }
        ("PATCH", "/v1/schedulers/soft0") => (200, scheduler("soft0")),
        ("GET", "/v1/parents") => {
            (200, json!([parent("soft0"), parent("soft1"), parent_with_screen()]))
        }
        ("POST", _) if path == format!("/v1/parents/{SCREEN}/rotation") => (200, screen(Some(20))),
        ("POST", "/v1/parents/soft0/rotation") => (
            409,
            refused(
                "conflict",
                "Parent soft0 has no physical screen, so its vGPUs cannot take turns on it",
            ),
        ),
        ("POST", _) if uuid == ON_SCREEN && path.ends_with("/focus") => {
            (200, json!({ "parent": SCREEN, "focus": ON_SCREEN, "switch_us": 210 }))
        }
        ("POST", _) if uuid == RUNNING && path.ends_with("/focus") => {
            (409, refused("conflict", "vGPU is on parent soft0, which has no physical screen"))
        }
        ("POST", _) if path.ends_with("/checkpoint") => checkpoint(uuid),
        ("GET", "/v1/vgpus") => (200, all.clone()),
        ("GET", "/v1/version") => (
            200,
            json!({
                "version": "0.1.0", "api": "1", "pid": 1,
                "run_dir": "/run/vgpud", "config_dir": "/var/lib/vgpud",
            }),
        ),
        ("GET", _) if path.ends_with("/screenshot") => {
            return ([(header::CONTENT_TYPE, "image/png")], "PNG").into_response();
        }
        ("POST", _) if path.ends_with("/console") => no_screen(uuid, &body),
        ("POST", "/v1/vgpus") if String::from_utf8_lossy(&body).contains("101") => {
            (400, refused("invalid", "Attribute \"core\" is 1 to 100 hundredths, not \"101\""))
        }
        ("POST", "/v1/vgpus") if String::from_utf8_lossy(&body).contains("SOFT-1C") => {
            (201, with_programs())
        }
        ("GET", _) if uuid == PROGRAMS => (200, with_programs()),
        ("POST", _) if uuid == PROGRAMS && path.ends_with("/stop") => (204, Value::Null),
        ("POST", "/v1/vgpus") => (201, find(TRANSIENT).unwrap()),
        ("POST", _) if uuid == RUNNING && path.ends_with("/stop") && !body.ends_with(b"true}") => (
            409,
            refused("in_use", "vGPU is used by process 815 (\"qemu\"); shut that VM down first"),
        ),
        _ => match find(uuid) {
            Some(_) if method == Method::DELETE || path.ends_with("/stop") => (204, Value::Null),
            Some(vgpu) => (200, vgpu),
            None => (404, refused("not_found", &format!("There is no vGPU {uuid}"))),
        },
    };
    (StatusCode::from_u16(status).unwrap(), axum::Json(value)).into_response()
}

/// Serves requests until the test ends, and records those that change something.
pub fn serve(socket: &Path, requests: Requests) {
    let listener = std::os::unix::net::UnixListener::bind(socket).unwrap();
    listener.set_nonblocking(true).unwrap();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::UnixListener::from_std(listener).unwrap();
            let app = Router::new().fallback(answer).with_state(requests);
            axum::serve(listener, app).await.unwrap();
        });
    });
}
