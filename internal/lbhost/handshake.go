package lbhost

import (
	"context"
	"crypto/sha1" //nolint:gosec // a name, not a secret: version 5 of RFC 9562
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"

	"github.com/stockade-run/stockade/internal/pluginwire"
)

// Workspace is the context of a Workspace of this LangBot at generation 1.
func (h *Host) Workspace(uuid string) pluginwire.Context {
	return pluginwire.Context{InstanceUUID: h.cfg.Identity.InstanceUUID, WorkspaceUUID: uuid, PlacementGeneration: 1}
}

// Bridge is the synthetic binding under which LangBot without tenants speaks for
// what is not an installation: the plugins of data/plugins.
func Bridge(workspace pluginwire.Context) pluginwire.Context {
	seed := "langbot:oss-plugin-bridge:" + workspace.InstanceUUID + ":" + workspace.WorkspaceUUID
	digest := sha256.Sum256([]byte(seed))
	b := workspace.Workspace()
	b.InstallationUUID, b.RuntimeRevision, b.ArtifactDigest = uuid5(seed), 1, hex.EncodeToString(digest[:])
	return b
}

// uuid5 names a text in the name space of URLs.
func uuid5(name string) string {
	space := []byte{0x6b, 0xa7, 0xb8, 0x11, 0x9d, 0xad, 0x11, 0xd1, 0x80, 0xb4, 0x00, 0xc0, 0x4f, 0xd4, 0x30, 0xc8}
	h := sha1.Sum(append(space, name...)) //nolint:gosec // see above
	h[6], h[8] = h[6]&0x0f|0x50, h[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", h[0:4], h[4:6], h[6:8], h[8:10], h[10:16])
}

// Ping asks for a sign of life.
func (h *Host) Ping(ctx context.Context) error {
	_, err := h.Call(ctx, pluginwire.ActionPing, struct{}{}, pluginwire.Context{})
	return err
}

// Configure sends set_runtime_config.
func (h *Host) Configure(ctx context.Context) error {
	_, err := h.Call(ctx, pluginwire.ActionSetRuntimeConfig, pluginwire.RuntimeConfig{
		Identity: h.cfg.Identity, Policy: *h.cfg.Policy, Profile: h.cfg.Profile, CloudServiceURL: h.cfg.CloudURL,
	}, pluginwire.Context{})
	return err
}

// Installation is what LangBot knows of an installation.
type Installation struct {
	Binding pluginwire.Context
	Enabled bool
	Mode    pluginwire.Mode
	Package []byte // pushed when the runtime has not got it; nil: it cannot be
}

// Handshake does what LangBot does when it has connected: it pings, configures,
// and replays all installations, in oss_dev after one list_plugins under the bridge
// of the Workspace; then it pushes and applies what the runtime has not got.
func (h *Host) Handshake(ctx context.Context, workspace pluginwire.Context, all ...Installation) (pluginwire.ReconcileResult, error) {
	var none pluginwire.ReconcileResult
	if err := h.Ping(ctx); err != nil {
		return none, err
	}
	if err := h.Configure(ctx); err != nil {
		return none, err
	}
	if h.cfg.Profile == pluginwire.ProfileOSS {
		if _, err := h.ListPlugins(ctx, Bridge(workspace)); err != nil {
			return none, err
		}
	}
	result, err := h.Reconcile(ctx, all...)
	if err != nil {
		return none, err
	}
	for _, uuid := range result.MissingArtifacts {
		for _, i := range all {
			if i.Binding.InstallationUUID == uuid && i.Package != nil {
				if _, err := h.Apply(ctx, i); err != nil {
					return result, err
				}
			}
		}
	}
	return result, nil
}

// Reconcile replays the whole desired state.
func (h *Host) Reconcile(ctx context.Context, all ...Installation) (pluginwire.ReconcileResult, error) {
	states := []map[string]any{}
	for _, i := range all {
		states = append(states, i.state(map[string]any{"binding": i.Binding}))
	}
	var out pluginwire.ReconcileResult
	err := h.ask(ctx, pluginwire.ActionReconcilePluginInstallations, map[string]any{"installations": states}, pluginwire.Context{}, &out)
	return out, err
}

// state adds enabled and the mode, which LangBot leaves out where it says nothing.
func (i Installation) state(m map[string]any) map[string]any {
	m["enabled"] = i.Enabled
	if i.Mode != "" {
		m["execution_mode"] = i.Mode
	}
	return m
}

// Apply pushes the package, if there is one, and applies the installation.
func (h *Host) Apply(ctx context.Context, i Installation) (pluginwire.StateResult, error) {
	var out pluginwire.StateResult
	req := i.state(map[string]any{})
	if i.Package != nil {
		key, err := h.Push(ctx, i.Package, "lbpkg", i.Binding)
		if err != nil {
			return out, err
		}
		req["artifact_file_key"] = key
	}
	err := h.ask(ctx, pluginwire.ActionApplyPluginInstallation, req, i.Binding, &out)
	return out, err
}

// Remove removes an installation.
func (h *Host) Remove(ctx context.Context, b pluginwire.Context) (pluginwire.StateResult, error) {
	var out pluginwire.StateResult
	err := h.ask(ctx, pluginwire.ActionRemovePluginInstallation, struct{}{}, b, &out)
	return out, err
}

// ask calls and decodes the answer.
func (h *Host) ask(ctx context.Context, action string, data any, on pluginwire.Context, out any) error {
	raw, err := h.Call(ctx, action, data, on)
	if err != nil {
		return err
	}
	return json.Unmarshal(raw, out)
}
