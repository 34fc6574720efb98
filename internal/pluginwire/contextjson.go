package pluginwire

import (
	"encoding/json"
	"strconv"

	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/jsonscan"
)

// DecodeContext reads the context of an envelope. Nothing and null are the zero
// Context. An object with a runtime_revision or an artifact_digest must be a whole
// binding; every other one is a Workspace context. Unknown members are refused, ids
// are trimmed. Errors are Invalid, of the class ValidationError.
func DecodeContext(raw []byte) (Context, error) {
	raw = trimJSON(raw)
	if isNull(raw) {
		return Context{}, nil
	}
	s := readStrict(raw, "ActionContext", "instance_uuid", "workspace_uuid", "placement_generation",
		"installation_uuid", "runtime_revision", "artifact_digest")
	_, revision := s.fields["runtime_revision"]
	_, digest := s.fields["artifact_digest"]
	if revision || digest {
		return s.binding()
	}
	c := Context{
		InstanceUUID:        s.id("instance_uuid", true),
		WorkspaceUUID:       s.id("workspace_uuid", true),
		PlacementGeneration: s.number("placement_generation", laxInt, 1),
		InstallationUUID:    s.id("installation_uuid", false),
	}
	if err := s.err(); err != nil {
		return Context{}, err
	}
	return c, nil
}

// DecodeBinding reads a complete binding and refuses everything else, as Invalid.
func DecodeBinding(raw []byte) (Context, error) {
	return readStrict(raw, "InstallationBinding", "instance_uuid", "workspace_uuid", "placement_generation",
		"installation_uuid", "runtime_revision", "artifact_digest").binding()
}

func (s *strict) binding() (Context, error) {
	s.model = "InstallationBinding"
	c := Context{
		InstanceUUID:        s.id("instance_uuid", true),
		WorkspaceUUID:       s.id("workspace_uuid", true),
		PlacementGeneration: s.number("placement_generation", strictInt, 1),
		InstallationUUID:    s.id("installation_uuid", true),
		RuntimeRevision:     s.number("runtime_revision", strictInt, 0),
		ArtifactDigest:      s.id("artifact_digest", true),
	}
	if c.ArtifactDigest != "" && !ident.IsDigest(c.ArtifactDigest) {
		s.bad("artifact_digest", "it must be 64 lower-case hexadecimal digits")
	}
	if err := s.err(); err != nil {
		return Context{}, err
	}
	return c, nil
}

// Append writes the context to dst as JSON: null for the zero Context, without an
// installation_uuid when there is none.
func (c Context) Append(dst []byte) []byte {
	if c.IsZero() {
		return append(dst, "null"...)
	}
	dst = append(dst, `{"instance_uuid":`...)
	dst = jsonscan.AppendString(dst, c.InstanceUUID)
	dst = append(dst, `,"workspace_uuid":`...)
	dst = jsonscan.AppendString(dst, c.WorkspaceUUID)
	dst = append(dst, `,"placement_generation":`...)
	dst = strconv.AppendInt(dst, c.PlacementGeneration, 10)
	if c.InstallationUUID != "" {
		dst = append(dst, `,"installation_uuid":`...)
		dst = jsonscan.AppendString(dst, c.InstallationUUID)
	}
	if c.IsBinding() {
		dst = append(dst, `,"runtime_revision":`...)
		dst = strconv.AppendInt(dst, c.RuntimeRevision, 10)
		dst = append(dst, `,"artifact_digest":`...)
		dst = jsonscan.AppendString(dst, c.ArtifactDigest)
	}
	return append(dst, '}')
}

// MarshalJSON is [Context.Append].
func (c Context) MarshalJSON() ([]byte, error) { return c.Append(nil), nil }

// UnmarshalJSON is [DecodeContext].
func (c *Context) UnmarshalJSON(raw []byte) (err error) {
	*c, err = DecodeContext(raw)
	return err
}

func trimJSON(raw json.RawMessage) []byte {
	s := jsonscan.Scanner{B: raw}
	s.Space()
	return raw[s.I:]
}
