//! Requests to the apiserver, and events.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};
use kube::api::{Patch, PatchParams};
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Api, Client};
use tokio::time::timeout;
use uuid::Uuid;

use super::DRIVER;
use super::claim::ClaimRef;
use super::conditions::{self, Readiness};

/// Timeout of a request: kubelet repeats its call after a failure.
const LIMIT: Duration = Duration::from_secs(10);
/// Interval at which the same event of the same object is repeated.
const EVENT_INTERVAL: Duration = Duration::from_secs(300);
/// Longest text of an event, in bytes.
const MAX_NOTE: usize = 1000;

/// Error of a request to the apiserver.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// No answer.
    #[error("The apiserver does not answer within 10 s; see `vgpu-kube doctor`")]
    Timeout,
    /// A refusal, or a failed connection.
    #[error("The apiserver: {0}; see `vgpu-kube doctor`")]
    Request(#[source] Box<kube::Error>),
}

type Result<T> = std::result::Result<T, ClusterError>;

/// Client of the apiserver.
#[derive(Clone)]
pub struct Cluster {
    client: Client,
    recorder: Recorder,
    /// Last events by object, to repeat each rarely.
    sent: std::sync::Arc<Mutex<BTreeMap<String, (String, Instant)>>>,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster").finish_non_exhaustive()
    }
}

impl Cluster {
    /// Creates a client for the agent of a node.
    pub fn new(client: Client, node: &str) -> Self {
        let reporter = Reporter { controller: DRIVER.into(), instance: Some(node.to_owned()) };
        let recorder = Recorder::new(client.clone(), reporter);
        Self { client, recorder, sent: std::sync::Arc::default() }
    }

    /// Returns kube's client.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// Returns a claim, if it exists.
    pub async fn claim(&self, namespace: &str, name: &str) -> Result<Option<ResourceClaim>> {
        let api = Api::<ResourceClaim>::namespaced(self.client(), namespace);
        limited(api.get_opt(name)).await
    }

    /// Returns the pods for which a claim is reserved. Pods that are gone are left out.
    pub async fn pods(&self, claim: &ResourceClaim) -> Result<Vec<Pod>> {
        let namespace = claim.metadata.namespace.clone().unwrap_or_default();
        let api = Api::<Pod>::namespaced(self.client(), &namespace);
        let reserved = claim.status.iter().flat_map(|status| status.reserved_for.iter().flatten());
        let mut pods = Vec::new();
        for consumer in reserved.filter(|consumer| consumer.resource == "pods") {
            let pod = limited(api.get_opt(&consumer.name)).await?;
            pods.extend(pod.filter(|pod| pod.metadata.uid.as_ref() == Some(&consumer.uid)));
        }
        Ok(pods)
    }

    /// Gives a claim's devices on a node these conditions. Does nothing if the claim has them. A
    /// failure is logged: the claim works without conditions.
    pub async fn set_conditions(
        &self,
        claim: &ResourceClaim,
        node: &str,
        readiness: impl Fn(&DeviceRequestAllocationResult) -> Option<Readiness>,
    ) {
        let Some(object) = conditions::object(claim, node, readiness) else { return };
        let namespace = claim.metadata.namespace.clone().unwrap_or_default();
        let name = claim.metadata.name.clone().unwrap_or_default();
        let api = Api::<ResourceClaim>::namespaced(self.client(), &namespace);
        // A claim can have devices of several nodes. Each agent writes those of its own.
        let manager = format!("{DRIVER}/{}", Uuid::new_v5(&Uuid::NAMESPACE_OID, node.as_bytes()));
        let params = PatchParams::apply(&manager).force();
        if let Err(error) = limited(api.patch_status(&name, &params, &Patch::Apply(&object))).await
            && self.is_news("conditions", &error.to_string())
        {
            log::warn!("Cannot write the conditions of claim {namespace}/{name}: {error}");
        }
    }

    /// Writes a warning that concerns a claim, unless it was written lately.
    pub async fn warn_claim(&self, claim: &ClaimRef, reason: &str, note: &str) {
        let object = ObjectReference {
            api_version: Some("resource.k8s.io/v1".into()),
            kind: Some("ResourceClaim".into()),
            namespace: Some(claim.namespace.clone()),
            name: Some(claim.name.clone()),
            uid: Some(claim.uid.clone()),
            ..ObjectReference::default()
        };
        self.warn(&object, reason, note).await;
    }

    /// Writes a warning that concerns the node, unless it was written lately.
    pub async fn warn_node(&self, node: &str, reason: &str, note: &str) {
        let object = ObjectReference {
            kind: Some("Node".into()),
            name: Some(node.to_owned()),
            // Events of nodes have the node's name as UID, as those of kubelet.
            uid: Some(node.to_owned()),
            ..ObjectReference::default()
        };
        self.warn(&object, reason, note).await;
    }

    async fn warn(&self, object: &ObjectReference, reason: &str, note: &str) {
        if !self.is_news(object.uid.as_deref().unwrap_or_default(), note) {
            return;
        }
        let event = Event {
            type_: EventType::Warning,
            reason: reason.to_owned(),
            note: Some(truncated(note, MAX_NOTE).to_owned()),
            action: reason.to_owned(),
            secondary: None,
        };
        match timeout(LIMIT, self.recorder.publish(&event, object)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => log::debug!("The apiserver takes no event: {error}"),
            Err(_) => log::debug!("The apiserver takes no event in time"),
        }
    }

    fn is_news(&self, object: &str, note: &str) -> bool {
        let mut sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        sent.retain(|_, (_, at)| at.elapsed() < EVENT_INTERVAL);
        if sent.get(object).is_some_and(|(last, _)| last == note) {
            return false;
        }
        sent.insert(object.to_owned(), (note.to_owned(), Instant::now()));
        true
    }
}

/// Returns the beginning of a text with at most `max` bytes.
pub fn truncated(text: &str, max: usize) -> &str {
    let end = (0..=max.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
    &text[..end.unwrap_or_default()]
}

/// Runs a request with a timeout.
pub async fn limited<T>(request: impl Future<Output = kube::Result<T>>) -> Result<T> {
    let answer = timeout(LIMIT, request).await.map_err(|_| ClusterError::Timeout)?;
    answer.map_err(|error| ClusterError::Request(Box::new(error)))
}
