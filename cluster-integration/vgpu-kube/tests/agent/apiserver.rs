//! Stand-in for the apiserver: stores objects by their paths, serves watches, counts requests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Result;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio::sync::broadcast;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::BroadcastStream;

/// Groups that the stand-in announces.
const GROUPS: &str = r#"{"kind":"APIGroupList","groups":[{"name":"resource.k8s.io",
    "versions":[{"groupVersion":"resource.k8s.io/v1","version":"v1"}]}]}"#;

/// Running stand-in.
#[derive(Debug)]
pub struct ApiServer {
    shared: Arc<Shared>,
    address: std::net::SocketAddr,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<Stored>,
    changes: broadcast::Sender<(String, Value)>,
}

#[derive(Debug, Default)]
struct Stored {
    objects: BTreeMap<String, Value>,
    version: u64,
    /// Requests by method and path of the collection.
    requests: BTreeMap<String, usize>,
    /// Members of devices that are dropped, as of a feature that is off.
    dropped: Option<&'static str>,
    /// Part of paths to which requests are refused.
    forbidden: Option<&'static str>,
}

impl ApiServer {
    /// Starts a stand-in without objects, on a thread of its own: tests may block.
    pub fn start() -> Result<Self> {
        let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let shared =
            Arc::new(Shared { state: Mutex::default(), changes: broadcast::channel(4096).0 });
        let router = Router::new().fallback(answer).with_state(Arc::clone(&shared));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        std::thread::spawn(move || {
            runtime.block_on(async {
                axum::serve(tokio::net::TcpListener::from_std(listener)?, router).await
            })
        });
        Ok(Self { shared, address })
    }

    fn state(&self) -> MutexGuard<'_, Stored> {
        self.shared.state()
    }

    /// Writes a kubeconfig.
    pub fn kubeconfig(&self, folder: &Path) -> Result<PathBuf> {
        let path = folder.join("kubeconfig");
        let text = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "t",
            "clusters": [{"name": "t", "cluster": {"server": self.url()}}],
            "users": [{"name": "t", "user": {}}],
            "contexts": [{"name": "t", "context": {"cluster": "t", "user": "t"}}],
        });
        std::fs::write(&path, text.to_string())?;
        Ok(path)
    }

    /// Returns the address.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Has devices' member dropped from now on.
    pub fn drop_member(&self, name: &'static str) {
        self.state().dropped = Some(name);
    }

    /// Refuses requests to paths with this part from now on.
    pub fn forbid(&self, part: Option<&'static str>) {
        self.state().forbidden = part;
    }

    /// Stores an object.
    pub fn put(&self, path: &str, object: Value) {
        self.shared.put(path, object);
    }

    /// Removes an object.
    pub fn delete(&self, path: &str) {
        self.shared.delete(path);
    }

    /// Returns an object.
    pub fn get(&self, path: &str) -> Option<Value> {
        self.state().objects.get(path).cloned()
    }

    /// Returns the objects of a collection.
    pub fn list(&self, collection: &str) -> Vec<Value> {
        let prefix = format!("{collection}/");
        let state = self.state();
        let own = state.objects.iter().filter(|(path, _)| path.starts_with(&prefix));
        own.map(|(_, object)| object.clone()).collect()
    }

    /// Returns the number of requests whose method and collection contain a text.
    pub fn requests(&self, text: &str) -> usize {
        let state = self.state();
        let own = state.requests.iter().filter(|(name, _)| name.contains(text));
        own.map(|(_, count)| count).sum()
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, Stored> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, path: &str, mut object: Value) -> Value {
        let mut state = self.state();
        state.version += 1;
        object["metadata"]["resourceVersion"] = json!(state.version.to_string());
        if object["metadata"]["uid"].is_null() {
            object["metadata"]["uid"] = json!(format!("uid-{}", state.version));
        }
        if let Some(dropped) = state.dropped {
            for device in object["spec"]["devices"].as_array_mut().into_iter().flatten() {
                device.as_object_mut().map(|device| device.remove(dropped));
            }
        }
        let before = state.objects.insert(path.to_owned(), object.clone());
        let kind = if before.is_some() { "MODIFIED" } else { "ADDED" };
        let event = json!({"type": kind, "object": object});
        let _ = self.changes.send((path.to_owned(), event));
        object
    }

    /// Applies the devices of a status, as the only manager of them.
    fn patch_status(&self, path: &str, body: &[u8]) -> Option<Value> {
        let path = path.strip_suffix("/status")?;
        let patch: Value = serde_json::from_slice(body).ok()?;
        let mut object = self.state().objects.get(path).cloned()?;
        object["status"]["devices"] = patch["status"]["devices"].clone();
        Some(self.put(path, object))
    }

    fn delete(&self, path: &str) -> Option<Value> {
        let mut state = self.state();
        state.version += 1;
        let mut object = state.objects.remove(path)?;
        object["metadata"]["resourceVersion"] = json!(state.version.to_string());
        let _ = self.changes.send((path.to_owned(), json!({"type": "DELETED", "object": object})));
        Some(object)
    }
}

async fn answer(
    State(shared): State<Arc<Shared>>,
    method: Method,
    uri: Uri,
    body: Bytes,
) -> Response {
    let path = uri.path().trim_end_matches('/').to_owned();
    let query = uri.query().unwrap_or_default();
    let watch = query.contains("watch=true");
    let (parent, name) = path.rsplit_once('/').unwrap_or_default();
    // Collections have plural names, and no object of the tests ends with an s.
    let is_collection = ["resourceslices", "events", "resourceclaims", "pods"].contains(&name)
        || name == "selfsubjectaccessreviews";
    let collection = if is_collection { path.clone() } else { parent.to_owned() };
    let verb = if watch { "WATCH".to_owned() } else { method.to_string() };
    *shared.state().requests.entry(format!("{verb} {collection}")).or_default() += 1;
    let forbidden = shared.state().forbidden;
    if forbidden.is_some_and(|part| path.contains(part)) {
        return refused(StatusCode::FORBIDDEN, "Forbidden");
    }
    match (method, path.as_str()) {
        (Method::GET, "/apis") => ([("content-type", "application/json")], GROUPS).into_response(),
        (Method::POST, "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews") => {
            let mut object: Value = serde_json::from_slice(&body).unwrap_or_default();
            object["status"] = json!({"allowed": true});
            axum::Json(object).into_response()
        }
        (Method::GET, _) if watch => serve_watch(&shared, &path, query),
        (Method::GET, _) if is_collection => list(&shared, &path, query),
        (Method::GET, _) => found(shared.state().objects.get(&path).cloned()),
        (Method::POST, _) => {
            let object: Value = serde_json::from_slice(&body).unwrap_or_default();
            let name = object["metadata"]["name"].as_str().unwrap_or("generated").to_owned();
            if query.contains("dryRun") {
                return (StatusCode::CREATED, axum::Json(object)).into_response();
            }
            (StatusCode::CREATED, axum::Json(shared.put(&format!("{path}/{name}"), object)))
                .into_response()
        }
        (Method::PUT, _) => {
            let object = serde_json::from_slice(&body).unwrap_or_default();
            axum::Json(shared.put(&path, object)).into_response()
        }
        (Method::PATCH, _) => found(shared.patch_status(&path, &body)),
        (Method::DELETE, _) => found(shared.delete(&path)),
        _ => StatusCode::METHOD_NOT_ALLOWED.into_response(),
    }
}

fn found(object: Option<Value>) -> Response {
    let missing = || refused(StatusCode::NOT_FOUND, "NotFound");
    object.map_or_else(missing, |object| axum::Json(object).into_response())
}

fn refused(code: StatusCode, reason: &str) -> Response {
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                        "message": "refused", "reason": reason, "code": code.as_u16()});
    (code, axum::Json(status)).into_response()
}

/// Returns the path of the one object that a field selector names.
fn selected(collection: &str, query: &str) -> Option<String> {
    let decoded = query.replace("%3D", "=");
    let name =
        decoded.split('&').find_map(|part| part.strip_prefix("fieldSelector=metadata.name="))?;
    Some(format!("{collection}/{name}"))
}

fn list(shared: &Shared, path: &str, query: &str) -> Response {
    let state = shared.state();
    let only = selected(path, query);
    let prefix = format!("{path}/");
    let own = state.objects.iter().filter(|(name, _)| match &only {
        Some(only) => *name == only,
        None => name.starts_with(&prefix),
    });
    let items: Vec<_> = own.map(|(_, object)| object.clone()).collect();
    let version = state.version.to_string();
    axum::Json(json!({"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": version},
                      "items": items}))
    .into_response()
}

fn serve_watch(shared: &Shared, path: &str, query: &str) -> Response {
    let only = selected(path, query);
    let prefix = format!("{path}/");
    let events = BroadcastStream::new(shared.changes.subscribe()).filter_map(move |event| {
        let (name, event) = event.ok()?;
        let is_own = only.as_ref().map_or(name.starts_with(&prefix), |only| *only == name);
        is_own.then(|| Ok::<_, std::convert::Infallible>(format!("{event}\n")))
    });
    ([("content-type", "application/json")], Body::from_stream(events)).into_response()
}
