//! The user of a pod: the one that may use the pod's vGPU.
//!
//! Containers share the kernel's user IDs with the host, unless they have a user namespace. Root of
//! a container is root of the host and may use any vGPU whose socket it can reach: only its own.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Container, Pod};

/// Error of a pod whose user is not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OwnerError {
    /// User namespace.
    #[error(
        "Pod {0} has a user namespace (hostUsers: false), in which its users have unknown numbers on the host; \
         leave hostUsers out"
    )]
    UserNamespace(String),
    /// Unknown user.
    #[error(
        "Pod {0} must not run as root (runAsNonRoot) and does not say as which user; set runAsUser in its \
         securityContext"
    )]
    Unknown(String),
    /// Several users.
    #[error(
        "The containers with claim {claim} run as several users ({users}); let them run as one"
    )]
    Several {
        /// Name of the claim.
        claim: String,
        /// Users.
        users: String,
    },
    /// No pod.
    #[error("No pod is known to use claim {0}; wait until the scheduler has reserved it for one")]
    NoPod(String),
}

/// Returns the user, by number, of the containers that use a claim. Containers that run as root do
/// not count: root may use every vGPU.
pub fn of(claim: &str, pods: &[Pod]) -> Result<u32, OwnerError> {
    if pods.is_empty() {
        return Err(OwnerError::NoPod(claim.to_owned()));
    }
    let mut users = BTreeSet::new();
    for pod in pods {
        users.extend(users_of(claim, pod)?);
    }
    users.remove(&0);
    let mut rest = users.iter();
    match (rest.next(), rest.next()) {
        (None, _) => Ok(0),
        (Some(user), None) => Ok(*user),
        _ => {
            let users: Vec<_> = users.iter().map(ToString::to_string).collect();
            Err(OwnerError::Several { claim: claim.to_owned(), users: users.join(", ") })
        }
    }
}

fn users_of(claim: &str, pod: &Pod) -> Result<BTreeSet<u32>, OwnerError> {
    let name = || pod.metadata.name.clone().unwrap_or_default();
    let Some(spec) = &pod.spec else { return Ok(BTreeSet::new()) };
    if spec.host_users == Some(false) {
        return Err(OwnerError::UserNamespace(name()));
    }
    let own = names_in(claim, pod);
    let uses = |container: &&Container| {
        let resources = container.resources.as_ref();
        let claims = resources.and_then(|resources| resources.claims.as_ref());
        claims.into_iter().flatten().any(|claim| own.contains(&claim.name))
    };
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers).filter(uses);
    let of_pod = spec.security_context.as_ref();
    let mut users = BTreeSet::new();
    for container in containers {
        let context = container.security_context.as_ref();
        let user = context.and_then(|context| context.run_as_user);
        let user = user.or(of_pod.and_then(|context| context.run_as_user));
        let non_root = context.and_then(|context| context.run_as_non_root);
        let non_root = non_root.or(of_pod.and_then(|context| context.run_as_non_root));
        match user.map(u32::try_from) {
            Some(Ok(user)) => {
                users.insert(user);
            }
            None if non_root != Some(true) => {
                users.insert(0);
            }
            _ => return Err(OwnerError::Unknown(name())),
        }
    }
    Ok(users)
}

/// Returns the names that a claim has in a pod.
fn names_in(claim: &str, pod: &Pod) -> BTreeSet<String> {
    let named = pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten());
    let named = named.filter(|entry| entry.resource_claim_name.as_deref() == Some(claim));
    let statuses = pod.status.iter();
    let made = statuses.flat_map(|status| status.resource_claim_statuses.iter().flatten());
    let made = made.filter(|entry| entry.resource_claim_name.as_deref() == Some(claim));
    named.map(|entry| entry.name.clone()).chain(made.map(|entry| entry.name.clone())).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(spec: Value) -> Pod {
        let mut spec = spec;
        spec["resourceClaims"] = json!([{"name": "gpu", "resourceClaimTemplateName": "t"}]);
        serde_json::from_value(json!({
            "metadata": {"name": "p1"}, "spec": spec,
            "status": {"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "p1-gpu-x7"}]},
        }))
        .unwrap()
    }

    fn container(uses: bool, context: &Value) -> Value {
        let claims = if uses { json!([{"name": "gpu"}]) } else { json!([]) };
        json!({"name": "c", "resources": {"claims": claims}, "securityContext": context})
    }

    fn user(spec: Value) -> Result<u32, OwnerError> {
        of("p1-gpu-x7", &[pod(spec)])
    }

    #[test]
    fn the_user_is_that_of_the_containers_with_the_claim() {
        let (root, alice) = (json!({}), json!({"runAsUser": 1000}));
        assert_eq!(user(json!({"containers": [container(true, &root)]})), Ok(0));
        assert_eq!(user(json!({"containers": [container(true, &alice)]})), Ok(1000));
        let both = json!([
            container(true, &root),
            container(false, &json!({"runAsUser": 7})),
            container(true, &alice)
        ]);
        assert_eq!(user(json!({"containers": both})), Ok(1000), "root may use it anyway");
        let pods = json!({"securityContext": {"runAsUser": 5, "runAsNonRoot": true},
                          "containers": [container(true, &json!({}))]});
        assert_eq!(user(pods), Ok(5));
    }

    #[test]
    fn pods_of_unknown_users_are_refused_in_one_line() {
        let error = |spec| user(spec).unwrap_err().to_string();
        let own = container(true, &json!({}));
        let said = error(json!({"hostUsers": false, "containers": [own]}));
        assert!(said.contains(" has a user namespace (hostUsers: false)"), "{said}");
        let said = error(json!({"containers": [container(true, &json!({"runAsNonRoot": true}))]}));
        assert!(said.contains("does not say as which user; set runAsUser"), "{said}");
        let said = error(json!({"containers": [
            container(true, &json!({"runAsUser": 1})), container(true, &json!({"runAsUser": 2}))]}));
        assert_eq!(
            said,
            "The containers with claim p1-gpu-x7 run as several users (1, 2); let them run as one"
        );
        let said = of("p1-gpu-x7", &[]).unwrap_err().to_string();
        assert!(said.starts_with("No pod is known to use claim"), "{said}");
    }
}
