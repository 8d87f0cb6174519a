//! Messages and services of kubelet and KubeVirt, generated from `proto/`.
#![allow(
    missing_docs,
    clippy::all,
    clippy::pedantic,
    reason = "the generator writes neither comments nor the code that clippy prefers"
)]

/// Device plugins.
pub mod deviceplugin {
    tonic::include_proto!("v1beta1");
}

/// Registration of plugins.
pub mod pluginregistration {
    tonic::include_proto!("pluginregistration");
}

/// Resources of pods.
pub mod podresources {
    tonic::include_proto!("v1");
}

/// Dynamic resource allocation. The service of `v1beta1` has the messages of `v1`, by a path that
/// follows the packages.
pub mod dra {
    /// Version 1.
    pub mod v1 {
        tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1");
    }
    /// Version 1, beta 1.
    pub mod v1beta1 {
        tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1beta1");
    }
}

/// KubeVirt's hooks.
pub mod kubevirt {
    /// Description of a sidecar.
    pub mod info {
        tonic::include_proto!("kubevirt.hooks.info");
    }
    /// Calls to a sidecar.
    pub mod v1alpha3 {
        tonic::include_proto!("kubevirt.hooks.v1alpha3");
    }
    /// Calls to a plugin.
    pub mod plugins {
        tonic::include_proto!("kubevirt.hooks.plugins.v1alpha1");
    }
}
