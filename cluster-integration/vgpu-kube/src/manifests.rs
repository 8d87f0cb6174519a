//! Objects that the cluster needs, as YAML for `kubectl apply`.

use anyhow::{Result, ensure};

/// Rights of the agents, the policy for their slices, and the classes of devices.
const CLUSTER: [&str; 3] = [
    include_str!("../../manifests/rbac.yaml"),
    include_str!("../../manifests/policy.yaml"),
    include_str!("../../manifests/deviceclass.yaml"),
];
/// Account of the agent on one node.
const NODE: &str = include_str!("../../manifests/node.yaml");
/// Placeholder of the node's name.
const PLACEHOLDER: &str = "@NODE@";

/// Returns the objects of the cluster, or those of one node.
pub fn text(node: Option<&str>) -> Result<String> {
    let Some(node) = node else { return Ok(CLUSTER.join("---\n")) };
    let valid =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
    let is_name = (1..=253).contains(&node.len()) && node.bytes().all(valid);
    ensure!(is_name, "--node: {node:?} is no name of a node; see `kubectl get nodes`");
    Ok(NODE.replace(PLACEHOLDER, node))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_objects_of_a_node_have_its_name() {
        let text = text(Some("n1.example.com")).unwrap();
        assert!(text.contains("name: \"n1.example.com\"") && !text.contains('@'), "{text}");
        let error = super::text(Some("n1\"\nkind: x")).unwrap_err().to_string();
        assert!(error.ends_with("is no name of a node; see `kubectl get nodes`"), "{error}");
        let all = super::text(None).unwrap();
        assert_eq!(all.matches("\nkind: ").count(), 9, "{all}");
    }
}
