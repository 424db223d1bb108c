output "driver" {
  description = "For [pools.NAME.fleet.driver], beside kind, instance_types and command."
  value = {
    aws_region      = data.aws_region.this.name
    launch_template = aws_launch_template.worker.name
    subnets         = { for zone, subnet in aws_subnet.zone : zone => subnet.id }
  }
}

output "files" {
  description = "For [batches.s3]."
  value       = { bucket = aws_s3_bucket.files.bucket, region = data.aws_region.this.name }
}

output "home" {
  description = "Instance profile, security group and subnets of the home region's machines."
  value = {
    instance_profile  = aws_iam_instance_profile.home.name
    security_group_id = aws_security_group.home.id
    subnet_ids        = [for subnet in aws_subnet.zone : subnet.id]
  }
}
