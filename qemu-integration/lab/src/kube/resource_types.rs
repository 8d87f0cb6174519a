//! Types of dynamic resource allocation (`resource.k8s.io/v1`), as custom resources.
//!
//! The lab's Kubernetes is older than the types. Its apiserver stores objects of them and reports
//! changes, and checks nothing: the types have no schema here.

use serde_json::{Value, json};

/// API group of the types.
const GROUP: &str = "resource.k8s.io";

/// Kind, plural, and whether objects are in a namespace and have a status.
const TYPES: [(&str, &str, bool, bool); 4] = [
    ("ResourceSlice", "resourceslices", false, false),
    ("DeviceClass", "deviceclasses", false, false),
    ("ResourceClaim", "resourceclaims", true, true),
    ("ResourceClaimTemplate", "resourceclaimtemplates", true, false),
];

/// Returns the definitions of the types.
pub fn definitions() -> Value {
    let items: Vec<_> = TYPES.iter().map(|one| definition(*one)).collect();
    json!({ "apiVersion": "v1", "kind": "List", "items": items })
}

/// Returns the names of the types, as kubectl takes them.
pub fn names() -> impl Iterator<Item = String> {
    TYPES.iter().map(|(_, plural, ..)| format!("{plural}.{GROUP}"))
}

fn definition((kind, plural, namespaced, has_status): (&str, &str, bool, bool)) -> Value {
    let schema = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
    let subresources = if has_status { json!({ "status": {} }) } else { json!({}) };
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {
            "name": format!("{plural}.{GROUP}"),
            // The apiserver asks who allowed a type in a group of Kubernetes.
            "annotations": { "api-approved.kubernetes.io": "unapproved, for tests" },
        },
        "spec": {
            "group": GROUP,
            "scope": if namespaced { "Namespaced" } else { "Cluster" },
            "names": {
                "kind": kind, "plural": plural, "singular": kind.to_lowercase(),
                "listKind": format!("{kind}List"),
            },
            "versions": [{
                "name": "v1", "served": true, "storage": true,
                "subresources": subresources, "schema": { "openAPIV3Schema": schema },
            }],
        },
    })
}
