package pluginwire

// Context says on whose behalf a message speaks. It is a plain value, compared
// field by field and usable as a key of a map.
//
// There are three forms. The zero value is no context. A Workspace context has
// an instance, a workspace and a generation, and perhaps an installation. A
// binding (IsBinding) has all six fields and is complete authority for one
// installation at one revision of one artifact.
type Context struct {
	InstanceUUID        string
	WorkspaceUUID       string
	PlacementGeneration int64 // at least 1
	InstallationUUID    string
	RuntimeRevision     int64  // at least 1 in a binding, else 0
	ArtifactDigest      string // 64 lower-case hexadecimal digits in a binding, else empty
}

// IsZero reports whether there is no context.
func (c Context) IsZero() bool { return c == Context{} }

// IsBinding reports whether c is an InstallationBinding: all six fields.
func (c Context) IsBinding() bool { return c.RuntimeRevision > 0 && c.ArtifactDigest != "" }

// SameWorkspace reports whether both speak for the same Workspace at the same
// placement generation of the same instance.
func (c Context) SameWorkspace(o Context) bool {
	return c.InstanceUUID == o.InstanceUUID && c.WorkspaceUUID == o.WorkspaceUUID && c.PlacementGeneration == o.PlacementGeneration
}

// Workspace returns c without its installation: the Workspace context.
func (c Context) Workspace() Context {
	return Context{InstanceUUID: c.InstanceUUID, WorkspaceUUID: c.WorkspaceUUID, PlacementGeneration: c.PlacementGeneration}
}
