// Package pluginlegacy owns the legacy directory of plugins, data/plugins: what
// LangBot without tenants installs by itself, in the profile oss_dev alone.
//
//	DATA/plugins/AUTHOR__NAME/        a plugin, with .venv where it has dependencies of its own
//	DATA/.plugin-staging/             what is being unpacked, or thrown away
//	DATA/.plugin-backups/             the generation before, while the next one proves itself
//	DATA/.env                         cloud_service_url, until LangBot tells it
//
// The layout is that of the published runtime, so that an operator can swap and go
// back.
//
// A generation becomes active in four steps, each one rename(2): the old one goes to
// the backups, the new one takes its place and is started, and when it is ready the
// backup goes to the staging directory, which is the commit; what is in the staging
// directory is then removed. [Owner.Configured] begins with repairing: a backup whose
// commit never came goes back to its place, whatever took it, and the staging directory
// is emptied. So a crash between any two steps leaves the old generation or, after the
// commit, the new one; never a part, and never neither.
//
// One plugin is changed by one caller at a time. Plugins are known by their directory's
// name: two identities that would share it are a conflict.
package pluginlegacy
